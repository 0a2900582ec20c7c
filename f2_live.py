"""Publishes, staged commits, failing writes, rolls and retention, while somebody reads directly."""
import random, sys, threading, time, logging
logging.disable(logging.CRITICAL)
from headrace import errors
from headrace.client.reader import BatchReader
from headrace.testing import running_server
rnd = random.Random(int(sys.argv[1]))
from headrace.testing import FaultyFiles
with running_server() as server, server.client() as client:
    client.create_topic("orders", segment_bytes=200 << 10)
    over = threading.Event(); seen_err = []
    def publish():
        with server.client() as c:
            n = 0
            while not over.is_set():
                k = rnd.choice([1, 5, 100]); c.publish_many("orders", [b"p%d." % (n+i) + b"x"*rnd.choice([1, 300, 3000]) for i in range(k)], partition=0); n += k
    t = threading.Thread(target=publish); t.start()
    until = time.monotonic() + 12; rounds = 0; direct = 0
    logp = server.engine.partition("orders", 0).log
    import collections
    with BatchReader([server.address], timeout=10) as d, BatchReader([server.address], timeout=10, direct=False) as s:
        at = 0
        while time.monotonic() < until:
            start, end = s.bounds("orders", 0)
            if end <= at: continue
            a = []
            for bs in d.read("orders", 0, at, end):
                for b in bs: a.append((b.base_offset, b.count, b.body_crc))
                assert server.engine.partition("orders",0).log.end_offset >= bs[-1].end_offset
                if rnd.random() < .05: time.sleep(.02)
            bb = [(b.base_offset, b.count, b.body_crc) for bs in s.read("orders", 0, at, end) for b in bs]
            assert a == bb, (at, end)
            for (x, c, _), (y, _, _) in zip(a, a[1:]): assert x + c == y
            at = end; rounds += 1
            if rnd.random() < .1: server.call(logp.drop_before, at)
        direct = d.direct_bytes
    over.set(); t.join()
    print("rounds", rounds, "to", at, "direct", direct)
