# redpoll in a container: one machine, everything in it, the records and Redis's file in the volume /data.
#
#     docker build -t redpoll .
#     docker run -p 6001:6001 -v redpoll:/data redpoll          # prints an app, and how to log in, at its first start
#
# deploy/compose.yaml runs it with limits, a read-only root and the dashboard on loopback.

FROM debian:trixie-slim AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/redpoll
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md ./
COPY ext ext
COPY src src
# Nothing needs pip later, and bytecode is compiled once, here.
RUN /opt/redpoll/bin/pip install --no-cache-dir --no-compile '.[embedded]' \
    && /opt/redpoll/bin/pip uninstall -y pip \
    && python3 -m compileall -q /opt/redpoll/lib

FROM debian:trixie-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin redpoll \
    && install -d -o redpoll -g redpoll -m 0700 /data
COPY --from=build /opt/redpoll /opt/redpoll
# The control port has the dashboard and the metrics: publish it on a private address only.
ENV PATH=/opt/redpoll/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    REDPOLL_DATA_DIR=/data \
    REDPOLL_CONTROL_HOST=0.0.0.0
# A number, so that Kubernetes can see that it isn't root.
USER 10001
VOLUME /data
EXPOSE 6001 9601
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["redpoll", "health"]
ENTRYPOINT ["redpoll"]
CMD ["serve"]
