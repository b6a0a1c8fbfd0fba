# An image of this project for Kubernetes: docker build -t NAME -f examples/kubernetes.Dockerfile .
# On a GPU, DeepSpeed compiles its own kernels, such as its Adam, with nvcc, which PyTorch's devel image has:
#   --build-arg BASE=pytorch/pytorch:2.14.1-cuda13.0-cudnn9-devel
# Without nvcc a GPU needs the optimizer parameter torch_adam: true. Neither base has been built, or run on a GPU.
ARG BASE=python:3.12-slim
FROM ${BASE}
# The Python of PyTorch's image is Ubuntu's, whose pip otherwise refuses to install packages
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt s3fs gcsfs
COPY *.py *.json *.yaml ./
COPY classify classify
COPY deepspeed_trial deepspeed_trial
COPY workbench workbench
COPY experiments experiments
