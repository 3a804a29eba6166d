# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The claim store's old place."""

from nova_accel.attach.claims import ClaimStore

__all__ = ['ClaimStore']
