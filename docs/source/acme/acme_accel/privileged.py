"""What of ACME's cards needs privileges, in a process of its own as root.

The caller may be compromised: each function checks its arguments.
"""

import fcntl
import re
import struct

from nova_accel.host import privileged
from nova_accel import privsep

# root owns what is written here: no capability is needed
ctx = privsep.Context(
    'acme_accel', cfg_section='acme_accel_privileged',
    pypath='acme_accel.privileged.ctx', capabilities=[])

#: attributes that may be written -> pattern of their values
WRITABLE = {'acme/power_limit': '[0-9]{2,3}'}
#: kernel drivers that a card may be bound to
DRIVERS = {'acme'}
#: ACME_IOC_SCRUB of acme.h
_SCRUB = 0xac01
_NODE = re.compile('acme[0-9]+')
#: ACME_IOC_PROGRAM and ACME_IOC_RESET of acme_fpga.h
_PROGRAM, _RESET = 0x4010ac02, 0xac03
#: ACME_IOC_DPU_RESET of acme_dpu.h
_DPU_RESET = 0xac04


@ctx.entrypoint
def credentials() -> tuple:
    return privileged.credentials_here()


@ctx.entrypoint
def write_attribute(function: str, attribute: str, value: str) -> None:
    privileged.write(function, attribute, value, WRITABLE)


@ctx.entrypoint
def rebind(function: str, driver: str) -> None:
    privileged.bind(function, driver, DRIVERS)


@ctx.entrypoint
def scrub(function: str) -> None:
    """Overwrite the memory of a card; block until done."""
    privileged.check_function(function)
    with privileged.device_node(
            f'{privileged.SYS}/bus/pci/devices/{function}/acme/acme*',
            _NODE, function) as node:
        fcntl.ioctl(node, _SCRUB)


@ctx.entrypoint
def program(function: str, path: str, offset: int, size: int) -> None:
    """Load a part of a file into the region of a card; block until done."""
    privileged.check_function(function)
    # refuses links, devices and what is longer than the operator allows
    with (privileged.mapped(path, offset, size) as start,
          _fpga(function) as node):
        fcntl.ioctl(node, _PROGRAM, struct.pack('=QQ', start, size))


@ctx.entrypoint
def reset_region(function: str) -> None:
    privileged.check_function(function)
    with _fpga(function) as node:
        fcntl.ioctl(node, _RESET)


def management_of(function: str) -> str:
    """The function of a DPU that stays with the host."""
    return f'{function[:-1]}1'


@ctx.entrypoint
def reset_dpu(function: str) -> None:
    """Reset the function of a DPU that guests get; block until done."""
    privileged.check_function(function)
    management = management_of(function)
    with privileged.device_node(
            f'{privileged.SYS}/bus/pci/devices/{management}/acme_dpu/acme*',
            _NODE, management) as node:
        fcntl.ioctl(node, _DPU_RESET)


def _fpga(function):
    return privileged.device_node(
        f'{privileged.SYS}/bus/pci/devices/{function}/acme_fpga/acme*',
        _NODE, function)
