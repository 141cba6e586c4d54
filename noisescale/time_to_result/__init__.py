# SPDX-License-Identifier: Apache-2.0
"""When trainings reached a goal, and which of them reached it first: Shallue et al., AlgoPerf."""
