"""The prefill process of steps.py: it has the same blocks on offer many times.

offers.py KIND BYTES BY   what its cache is, how large a block, and the transport; prints the bootstrap address, and ends when it is killed
"""

from __future__ import annotations

import sys

from caches import cache_of
from transfers import agent_of, large

import kvconn

AHEAD, BYTE = 800, 7  # offers; what the blocks hold


def main(kind: str, block: int, by: str) -> None:
    of = large(block)
    cache = cache_of(kind, 0, of.blocks, of.bytes)
    cache.fill(BYTE)
    with agent_of("prefill", cache, by) as agent:
        agent.offer([kvconn.Offer(f"t{i}", [list(range(0, of.blocks, 2))]) for i in range(AHEAD)])
        print(agent.bootstrap_address, flush=True)
        while True:
            agent.get_finished()
            agent.wait(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
