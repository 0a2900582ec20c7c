"""A stand-in for curl, for machines without it: the options that the pages use, and no more.

``python curl.py [-s] [-i] [-X METHOD] [-H HEADER] [-d BODY] URL`` prints the body of the answer; with ``-i``,
its status and headers first.
"""

import argparse
import sys
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(prog="curl")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-i", dest="show", action="store_true")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-X", dest="method")
    parser.add_argument("-d", dest="body")
    parser.add_argument("url")
    asked = parser.parse_args()
    body = None if asked.body is None else asked.body.encode()
    headers = dict(header.split(": ", 1) for header in asked.headers)
    request = urllib.request.Request(asked.url, body, headers, method=asked.method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        head = f"HTTP/1.1 {answer.status} {answer.reason}\r\n{answer.headers}" if asked.show else ""
        sys.stdout.buffer.write(head.encode() + answer.read())


if __name__ == "__main__":
    main()
