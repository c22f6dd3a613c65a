"""The connector of a kvconn that has never heard of full attention, for test_served.py."""

from kvconn.vllm import kinds

del kinds.KINDS["FullAttentionSpec"]

from kvconn.vllm.connector import KVConnConnector  # noqa: E402

__all__ = ["KVConnConnector"]
