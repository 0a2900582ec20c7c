"""The conversation of the seed "Go-Broker", byte for byte over a bare socket.

Its example announces 15 bytes and sends 16; here it announces what it sends.
"""

import socket

from headrace.testing import RunningServer, running_server


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(server.address, 10)


def read(plain: socket.socket, size: int) -> bytes:
    heard = b""
    while len(heard) < size:
        data = plain.recv(size - len(heard))
        assert data, f"the broker hung up after {heard!r}"
        heard += data
    return heard


def test_a_producer_publishes_and_a_consumer_fetches() -> None:
    """PUB is answered with OK and the offset, FETCH with MSG, the size and the payload."""
    with running_server() as server:
        with connect(server) as producer:
            for offset in range(50):
                producer.sendall(b"PUB orders 4\r\nmore")
                answer = b"OK %d\r\n" % offset
                assert read(producer, len(answer)) == answer
            producer.sendall(b'PUB orders 16\r\n{"order_id":101}')
            assert read(producer, 7) == b"OK 50\r\n"
        with connect(server) as consumer:
            consumer.sendall(b"FETCH orders 50\r\n")
            expected = b'MSG 50 16\r\n{"order_id":101}'
            assert read(consumer, len(expected)) == expected


def test_with_netcat() -> None:
    """Bare line ends, one behind the payload too, and everything in one go."""
    with running_server() as server, connect(server) as plain:
        plain.sendall(b'PUB orders 16\n{"order_id":101}\nFETCH orders 0\n')
        expected = b'OK 0\r\nMSG 0 16\r\n{"order_id":101}'
        assert read(plain, len(expected)) == expected


def test_the_consumer_is_down_and_the_messages_wait() -> None:
    """The story of the seed: the e-mail worker comes back, and so does the broker."""
    with running_server() as server:
        with connect(server) as order_service:
            order_service.sendall(b'PUB orders 16\r\n{"order_id":101}')
            assert read(order_service, 6) == b"OK 0\r\n"
        server.kill()
        server.start()
        with connect(server) as email_worker, connect(server) as analytics_worker:
            for worker in (email_worker, analytics_worker):
                worker.sendall(b"FETCH orders 0\r\n")
                expected = b'MSG 0 16\r\n{"order_id":101}'
                assert read(worker, len(expected)) == expected


def test_one_log_for_each_topic_under_the_data_directory() -> None:
    """./data/<topic>/…log, append-only."""
    with running_server() as server:
        with connect(server) as plain:
            plain.sendall(b"PUB orders 2\r\nhiPUB users 2\r\nho")
            assert read(plain, 12) == b"OK 0\r\nOK 0\r\n"
        for topic in ("orders", "users"):
            logs = list((server.data_dir / topic).rglob("*.log"))
            assert len(logs) == 1
            assert (b"hi" if topic == "orders" else b"ho") in logs[0].read_bytes()
