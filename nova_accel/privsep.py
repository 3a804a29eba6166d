# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The privileged process of nova_accel.

It runs as root, and root owns every sysfs attribute and device node that is
written, so it keeps a single capability: to read a bitstream in nova's own
directory. Its entry points are in nova_accel.host.privileged.
"""

from oslo_privsep import capabilities
from oslo_privsep import priv_context

ctx = priv_context.PrivContext(
    'nova_accel',
    cfg_section='nova_accel_privileged',
    pypath='nova_accel.privsep.ctx',
    capabilities=[capabilities.CAP_DAC_READ_SEARCH])
