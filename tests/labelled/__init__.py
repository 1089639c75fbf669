# SPDX-License-Identifier: Apache-2.0
"""A labelled suite: real leaks, and things that are no leak, on vLLM's own classes, judged by the whole chain.

Each case runs in a process of its own: `run_cases.py` drives the real scheduler of a release, does to it what the case
says, and records what the plugin tells of that process. The recording is judged in the test's process as the sidecar
would. Only the clock is made up: a tick of some milliseconds counts as ten seconds or a minute.
"""
