# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The privileged processes of nova_accel.

They run as root, which owns every sysfs attribute and device node that they
write. One process therefore keeps a single capability, to read a bitstream in
nova's own directory. The other starts only to erase disks, for which the
kernel demands CAP_SYS_ADMIN. The entry points are in
nova_accel.host.privileged.
"""

from oslo_privsep import capabilities
from oslo_privsep import priv_context

ctx = priv_context.PrivContext(
    'nova_accel',
    cfg_section='nova_accel_privileged',
    pypath='nova_accel.privsep.ctx',
    capabilities=[capabilities.CAP_DAC_READ_SEARCH])

disks = priv_context.PrivContext(
    'nova_accel',
    cfg_section='nova_accel_privileged_disks',
    pypath='nova_accel.privsep.disks',
    capabilities=[capabilities.CAP_SYS_ADMIN])
