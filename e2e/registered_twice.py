"""The connector of somebody who has put NIXL's name into vLLM's register before kvconn is asked for it, for test_served.py."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

KVConnectorFactory._registry.pop("NixlConnector")
KVConnectorFactory.register_connector("NixlConnector", __name__, "Theirs")

from kvconn.vllm import NixlConnector  # noqa: E402

__all__ = ["NixlConnector"]
