# SPDX-License-Identifier: Apache-2.0
"""When trials reached a goal, and which was first: Shallue et al., AlgoPerf."""
