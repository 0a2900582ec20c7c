"""A stand-in for curl, for machines without it: the options that README.md uses, and no more.

``python curl.py [-s] [-X METHOD] [-d BODY] URL`` prints the body of the answer.
"""

import argparse
import sys
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(prog="curl")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-d", dest="body")
    parser.add_argument("url")
    asked = parser.parse_args()
    body = None if asked.body is None else asked.body.encode()
    request = urllib.request.Request(asked.url, body, method=asked.method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        sys.stdout.buffer.write(answer.read())


if __name__ == "__main__":
    main()
