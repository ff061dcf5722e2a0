# The service alone. Redis and the engine are containers of their own: see docker-compose.yml.
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY orchestrator orchestrator
COPY agents agents
COPY backends backends
COPY benchmarks benchmarks
RUN pip install -c constraints.txt . \
    && useradd --system --no-create-home swarm

COPY docker/config.yaml /etc/swarm/config.yaml
USER swarm
WORKDIR /
EXPOSE 8700
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s --retries=12 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8700/healthz', timeout=2)"]
CMD ["swarm", "up", "-c", "/etc/swarm/config.yaml"]
