# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova.virt.accel: where Nova looks for compute_driver = accel.AccelLibvirtDriver."""  # noqa: E501

import logging

from nova_accel import versions

if versions.too_old():
    # nova-compute logs it and ends; what follows would fail without a reason
    raise ImportError(versions.too_old())
if versions.too_new():
    logging.getLogger(__name__).warning(versions.too_new())

from nova_accel.virt.driver import AccelLibvirtDriver  # noqa: E402

__all__ = ['AccelLibvirtDriver']
