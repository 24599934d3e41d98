# The project on a CPU: docker build -t gsm . && docker run -it gsm make train
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /gsm
COPY . .
RUN make .venv/.installed
ENV PATH="/gsm/.venv/bin:$PATH"
CMD ["make", "train"]
