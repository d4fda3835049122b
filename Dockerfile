# redpoll in a container: one machine, everything in it, the records and Redis's file in the volume /data.
#
#     docker build -t redpoll .
#     docker run -it -p 6001:6001 -v redpoll:/data redpoll      # prints an app, and how to log in, at its first start
#     docker exec CONTAINER redpoll first-login                 # shows both, where no terminal was (`docker run -d`)
#
# deploy/compose.yaml runs it with limits, a read-only root and the dashboard on loopback.

FROM debian:trixie-slim AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/redpoll
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY deploy/requirements.lock deploy/requirements-build.lock ./
COPY ext ext
COPY src src
# Nothing needs pip later. Symbols, sources of extensions and tests of libraries are 50 MB. Bytecode is compiled once, here.
# Only files whose hashes are in the lock files (deploy/lock-requirements) are installed.
RUN /opt/redpoll/bin/pip install --no-cache-dir --no-compile --require-hashes -r requirements.lock -r requirements-build.lock \
    && /opt/redpoll/bin/pip install --no-cache-dir --no-compile --no-index --no-deps --no-build-isolation . \
    && /opt/redpoll/bin/pip check \
    && /opt/redpoll/bin/pip uninstall -y cython setuptools pip \
    && find /opt/redpoll/lib -name '*.so' -exec strip --strip-unneeded {} + \
    && find /opt/redpoll/lib -regex '.*\.\(pyx\|pxd\|pxi\|pyi\|c\|h\|hpp\)' -delete \
    && rm -r /opt/redpoll/lib/python3.*/site-packages/sqlalchemy/testing \
    && python3 -m compileall -q /opt/redpoll/lib

FROM debian:trixie-slim AS root
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 redpoll \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /data --shell /usr/sbin/nologin redpoll \
    && install -d -o redpoll -g redpoll -m 0700 /data
COPY --from=build /opt/redpoll /opt/redpoll
# Debian without its package manager, Perl, Bash, programs for logins and tables of character sets: 50 MB that a server
# doesn't use. sh and the usual small programs stay, and the list of packages that vulnerability scanners read.
RUN dpkg --purge --force-all \
        apt libapt-pkg7.0 sqv debian-archive-keyring \
        bash bsdutils diffutils login mount openssl passwd perl-base util-linux \
        libdb5.3t64 libsemanage2 libsepol2 libsystemd0 libudev1 \
    && rm -rf /usr/lib/*/gconv /var/cache/* /var/log/*

# One layer, so that what was removed isn't in it.
FROM scratch
# hadolint ignore=DL3067
COPY --from=root / /
LABEL org.opencontainers.image.title="redpoll" \
      org.opencontainers.image.description="A self-hosted real-time messaging server, wire-compatible with Pusher Channels" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.vendor="the redpoll authors"
# The control port has the dashboard and the metrics: publish it on a private address only.
ENV PATH=/opt/redpoll/bin:/usr/local/bin:/usr/sbin:/usr/bin \
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
