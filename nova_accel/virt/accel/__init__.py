# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova.virt.accel: where Nova looks for compute_driver = accel.AccelLibvirtDriver."""  # noqa: E501

from nova_accel.virt.driver import AccelLibvirtDriver

__all__ = ['AccelLibvirtDriver']
