# A broker in a container:
#
#   docker build -t headrace .
#   docker run -p 127.0.0.1:9999:9999 -p 127.0.0.1:8080:8080 -v headrace:/data \
#     -e HEADRACE_TOKEN="$(openssl rand -hex 32)" headrace
#
# The broker listens on every address of the container. It refuses to do so without HEADRACE_TOKEN,
# unless HEADRACE_INSECURE=true. Every setting is a HEADRACE_* variable; `headrace config` lists them.
# deploy/ has a compose file with Prometheus and Grafana, and manifests for Kubernetes.

FROM python:3.11-slim AS build
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python -m venv /opt/headrace \
    && /opt/headrace/bin/pip install --no-cache-dir --disable-pip-version-check \
        -c constraints.txt .

FROM python:3.11-slim
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data \
        --shell /usr/sbin/nologin headrace \
    && install -d -o headrace -g headrace -m 0700 /data
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HEADRACE_HOST=0.0.0.0 \
    HEADRACE_DATA_DIR=/data
# As numbers: Kubernetes does not know from a name that this user is not root.
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 9999 8080
# The broker answers the requests under way, syncs everything and exits.
STOPSIGNAL SIGTERM
# With TLS, or another HEADRACE_HTTP_PORT, give `docker run` a --health-cmd of your own.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health/live', timeout=2)"]
ENTRYPOINT ["headrace"]
CMD ["serve"]
