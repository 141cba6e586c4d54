# SPDX-License-Identifier: Apache-2.0
"""One thread a process, loopback for gloo: what makes two-process tests fast and repeatable."""

import os

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch

torch.set_num_threads(1)
