"""Imported once by the server that test processes fork from."""

import logging

import torch
import torchrec
import torchrec.distributed.model_parallel

import torchrec_ext.delta.dumper  # noqa: F401

logging.getLogger("torchrec").setLevel(logging.ERROR)
assert torch.ops.fbgemm, torchrec
