# The library and its command line, without torch: docker run --rm moe_rl simulate countdown-grpo --ep 16
# A run of yours: docker run --rm -v "$PWD:/data" -w /data moe_rl simulate run.moetrace --model qwen3-30b-a3b --html report.html
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY . /source
WORKDIR /source
ENV PIP_CONSTRAINT=/source/constraints.txt MOE_RL_REQUIRE_NATIVE=1
RUN pip wheel --no-cache-dir --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels moe-rl && rm -r /wheels
USER nobody
ENTRYPOINT ["moe-rl"]
CMD ["--help"]
