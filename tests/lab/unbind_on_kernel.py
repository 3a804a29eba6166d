# Licensed under the Apache License, Version 2.0. See LICENSE.
"""In the machine, as root: unbind a device that a process has open by VFIO.

    unbind_on_kernel.py 0000:00:0a.0

The exit status is 1 when something is not as expected.
"""

import contextlib
import subprocess
import sys
import time

from oslo_config import cfg

from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import pci
from nova_accel.host import usage
from nova_accel.inventory import cards
from nova_accel import privsep

HOLD = '''
from nova_accel.host import nvidia
with nvidia.by_vfio('/sys', '/dev', '{}'):
    print('open', flush=True)
    __import__('signal').pause()
'''


def main(address):
    cfg.CONF([], project='nova', default_config_files=[])
    for context in (privsep.ctx, privsep.processes):
        context.set_client_mode(False)
    kernel, found = host_kernel.Kernel(), []
    kernel.rebind(address, 'vfio-pci')
    with subprocess.Popen([sys.executable, '-c', HOLD.format(address)],
                          stdout=subprocess.PIPE) as holder, (
            contextlib.ExitStack()) as stack:
        # before Popen waits for it
        stack.callback(holder.terminate)
        holder.stdout.readline()
        expected = f'(process {holder.pid}) has /dev/vfio/'
        # the second caller knows nothing of the first, as after a restart
        for caller in cards.Cards(), cards.Cards():
            began = time.monotonic()
            try:
                caller.call(address, f'Unbinding {address}', kernel.unbind,
                            address, seconds=5)
                found.append('unbound')
            except exception.DeviceTimeout as error:
                found.append(str(error))
            name = usage.named(kernel.processes([address]))
            print(f'{time.monotonic() - began:.1f} s: {found[-1]} {name}; '
                  f'driver {pci.driver(kernel, address)}', flush=True)
            if ('did not end within 5 s' not in found[-1]
                    or expected not in name or pci.driver(kernel, address)):
                return 1
    kernel.unbind(address)
    kernel.probe(address)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1]))
