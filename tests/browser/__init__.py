# SPDX-License-Identifier: Apache-2.0
"""The live page in a real browser, served by a sidecar that follows engines, real and fake ones."""
