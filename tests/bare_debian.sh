#!/bin/sh
# Check that `make run` and `make test` work on a bare Debian: tests/bare_debian.sh
#
# The script makes a Debian in a temporary directory that has git, make and python3 and nothing else
# (no Java, no curl, no venv module), clones the committed tree into it, starts a broker with
# `make run`, stops it once it answers, and runs `make test`. It needs root and debootstrap.
#
# Variables: SUITE, the release of Debian (bookworm); ARGS, the arguments of `make test`;
# KEEP=1 keeps the directory.
#
# All of it runs in mount and process namespaces of its own: no mount and no process outlives the
# script, however it ends.
set -eu

main() { # a function, so that the shell reads all of the file before it runs a part for an hour
	if [ "${BARE_STEP:-}" = "" ]; then
		root=$(cd "$(dirname "$0")/.." && pwd)
		[ "$(id -u)" = 0 ] || { echo "This check needs root, for chroot and mount." >&2; exit 2; }
		command -v debootstrap >/dev/null ||
			{ echo "This check needs debootstrap: apt-get install debootstrap" >&2; exit 2; }
		temporary=$(mktemp -d)
		chmod 755 "$temporary" # apt drops its rights and must still reach its files
		trap '[ -n "${KEEP:-}" ] && echo "Kept $temporary" || rm -rf --one-file-system "$temporary"' EXIT
		trap 'exit 130' INT TERM HUP
		BARE_STEP=outside ROOT=$root BARE=$temporary/debian \
			unshare --mount --pid --fork --kill-child sh "$root/tests/bare_debian.sh"
	elif [ "$BARE_STEP" = outside ]; then
		mount --make-rprivate /
		mount -t proc proc /proc
		echo "Making a Debian (${SUITE:-bookworm}) with git, make and python3 …"
		debootstrap --variant=minbase --include=git,make,python3 "${SUITE:-bookworm}" "$BARE" \
			>"$BARE.log" 2>&1 || { tail -n 20 "$BARE.log" >&2; exit 1; }
		rm -f "$BARE.log"
		mountpoint -q "$BARE/proc" || mount -t proc proc "$BARE/proc"
		mkdir -p "$BARE/dev/shm" "$BARE/dev/pts"
		mount -t tmpfs tmpfs "$BARE/dev/shm"
		mount -t devpts -o ptmxmode=0666 devpts "$BARE/dev/pts"
		cp /etc/resolv.conf /etc/hosts "$BARE/etc/"
		git clone --quiet --no-local "$ROOT" "$BARE/root/headrace"

		# The way to the package registries: proxies, and certificates that this machine trusts.
		set -- HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin "ARGS=${ARGS:-}" BARE_STEP=inside
		for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY \
			PIP_INDEX_URL PIP_DEFAULT_TIMEOUT; do
			eval "value=\${$name:-}"
			[ -z "$value" ] || set -- "$@" "$name=$value"
		done
		certificates=${PIP_CERT:-${SSL_CERT_FILE:-}}
		if [ -n "$certificates" ]; then
			cp "$certificates" "$BARE/root/certificates.pem"
			set -- "$@" PIP_CERT=/root/certificates.pem
		fi
		exec env -i "$@" chroot "$BARE" sh /root/headrace/tests/bare_debian.sh
	else
		cd /root/headrace
		for command in curl java; do
			! command -v $command >/dev/null || { echo "This Debian has $command." >&2; exit 1; }
		done
		! python3 -c 'import ensurepip' 2>/dev/null || { echo "This Debian has venv." >&2; exit 1; }

		echo "make run …"
		setsid make run ARGS="--port 0 --http-port 0" >/tmp/run.log 2>&1 &
		broker=$!
		while ! grep -q "^Headrace is ready" /tmp/run.log; do
			kill -0 $broker 2>/dev/null || { cat /tmp/run.log >&2; echo "make run failed." >&2; exit 1; }
			sleep 1
		done
		url=$(grep -o 'http://[0-9.:]*' /tmp/run.log | head -n 1)
		python3 -c "import urllib.request as u; print(u.urlopen('$url/health/live', timeout=10).read())"
		kill -TERM -$broker
		wait $broker || true
		cat /tmp/run.log

		echo "make test …"
		make test ARGS="$ARGS"
		echo "make run and make test work on a bare Debian."
	fi
}

main
