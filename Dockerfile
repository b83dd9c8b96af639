# SPDX-License-Identifier: Apache-2.0
#
# docker build -t attnd .
#
# The server and attnctl with nothing but the libraries they load, as user attnd. The socket is /run/attnd/attnd.sock:
# mount /run/attnd into the model server's container too, and run both with the same user id.

FROM debian:12-slim AS build
WORKDIR /src
COPY scripts/lib scripts/lib
RUN bash -c 'set -euo pipefail; source scripts/lib/setup.sh; setup_packages "${ATTND_BUILD_PACKAGES[@]}"' \
    && rm -rf /var/lib/apt/lists/*
COPY . .
RUN cmake --preset release -DATTND_TESTS=OFF -DATTND_BENCH=OFF -Wno-dev \
    && cmake --build --preset release --target attnd attnctl \
    && strip build/bin/attnd build/bin/attnctl \
    && scripts/lib/runtime_packages.sh build/bin/attnd build/bin/attnctl > build/runtime-packages.txt

FROM debian:12-slim
COPY --from=build /src/build/runtime-packages.txt /usr/share/attnd/
RUN apt-get update \
    && xargs -a /usr/share/attnd/runtime-packages.txt env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --system --gid 10001 attnd \
    && useradd --system --uid 10001 --gid attnd --home-dir /var/lib/attnd --shell /usr/sbin/nologin attnd \
    && install -d -o attnd -g attnd -m 0700 /run/attnd /var/lib/attnd
COPY --from=build /src/build/bin/attnd /usr/local/bin/attnd
COPY --from=build /src/build/bin/attnctl /usr/local/bin/attnctl
COPY LICENSE /usr/share/doc/attnd/
USER attnd
VOLUME ["/run/attnd", "/var/lib/attnd"]
EXPOSE 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["/usr/local/bin/attnd", "--probe", "unix:/run/attnd/attnd.sock"]
ENTRYPOINT ["/usr/local/bin/attnd"]
CMD ["--listen", "unix:/run/attnd/attnd.sock", "--data-dir", "/var/lib/attnd", "--metrics-listen", "0.0.0.0:9464", \
     "--allow-remote-metrics"]
