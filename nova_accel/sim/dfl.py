# Licensed under the Apache License, Version 2.0. See LICENSE.
"""FPGA cards under the DFL drivers, as observed with Linux 6.12."""

import dataclasses
import errno
import json
import os
import struct
import time
from typing import ClassVar
import uuid

from nova_accel import model
from nova_accel.sim import card
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs

#: product -> vendor, device, subsystem device of the PF, device of its VFs
PRODUCTS = {
    'PAC_ARRIA10': ('8086', '09c4', '0000', '09c5'),
    'PAC_N3000': ('8086', '0b30', '0000', None),
    'PAC_D5005': ('8086', '0b2b', '0000', '0b2c'),
    'N6000': ('8086', 'bcce', '1770', 'bccf'),
    'N6001': ('8086', 'bcce', '1771', 'bccf'),
}
#: name of a programming fault -> status that the manager shows after it
PR_ERRORS = {
    'operation': 'reconfig operation error',
    'crc': 'reconfig CRC error',
    'incompatible': 'reconfig incompatible image',
    'protocol': 'reconfig IP protocol error',
    'fifo': 'reconfig fifo overflow error',
    'timeout': None,
}
#: the initial function of a region: OPAE's loopback test
DEFAULT_FUNCTION = 'd8424dc4a4a3c413f89e433683f9040b'
DEFAULT_INTERFACE = '9926ab6d6c925a68aabca7d84c545738'

#: beginning of a GBS file
_GUID = b'XeonFPGA\xb7GBSv001'
#: marker in a payload, after the two UUIDs
_CLEARS_MEMORY = b'clears memory'
_ALL_ONES = 'f' * 32


@dataclasses.dataclass(frozen=True)
class DflCard(card.Card):
    """A card with an FME and up to four ports."""

    class_code: str = '0x120000'
    driver: str | None = 'dfl-pci'
    vf_driver: str | None = 'dfl-pci'
    ports: int = 1
    interface: str = DEFAULT_INTERFACE
    #: factory function of each port
    functions: tuple[str, ...] = ()
    shell: str = '0x123000200000185'
    programming_seconds: float = 1.0
    timeout_seconds: float = 8.0
    #: number of VFs of the slot of an OFS board under linux-dfl (see is_ofs());
    #: 0 under mainline Linux
    afu_vfs: int = 0

    KEYS: ClassVar[dict] = {
        'ports': reader.checked(lambda v: type(v) is int and 1 <= v <= 4,
                                '1 to 4'),
        'interface': model.uuid_hex, 'shell': reader.text,
        'programming_seconds': reader.seconds,
        'timeout_seconds': reader.seconds, 'afu_vfs': reader.natural}
    FAULTS: ClassVar[dict] = {
        **card.Card.FAULTS,
        'accept_id': model.uuid_hex,
        'busy': reader.boolean,
        'hang': reader.one_of('read', 'program'),
        'port_reset': reader.one_of('EBUSY', 'ETIMEDOUT'),
        'port_errors': reader.text,
        'pr_error': reader.one_of(*PR_ERRORS),
        'pr_error_count': reader.natural,
    }

    @classmethod
    def describe(cls, item):
        functions = item.take('functions', reader.uuids, [DEFAULT_FUNCTION])
        vendor, device, subsystem, vf_device = PRODUCTS[
            item.take('product', reader.one_of(*PRODUCTS), 'PAC_ARRIA10')]
        driver = (item.take('driver', _driver, None)
                  if 'driver' in item.items else cls.driver)
        fields = cls.describe_any(item)
        ports = fields['ports']
        most = fields['afu_vfs'] or (ports if vf_device else 0)
        return dict(
            fields, ids=(vendor, device, vendor, subsystem), driver=driver,
            total_vfs=most, vf_device=vf_device,
            vfs=item.take('vfs', reader.up_to(max(ports, most)), 0),
            functions=tuple(functions[n % len(functions)]
                            for n in range(ports)))

    def addresses(self):
        return [self.address, *(self.vf_address(n) for n in range(
            max(self.ports, self.total_vfs)))]

    # State

    def fresh(self, state):
        return {**super().fresh(state), 'functions': list(self.functions),
                'left': {},
                'released': [], 'lost': [], 'disabled': {},
                'manager': 'unknown', 'status': [], 'program': None,
                'errors': {}, 'failed': 0}

    def at_first(self, state):
        mine = self.fresh(state)
        if self.vfs and mine['driver'] == 'dfl-pci':
            mine['released'] = [] if self.afu_vfs else list(range(self.vfs))
            self.make_vfs(state, mine, self.vfs)
        return mine

    def keeps(self):
        return (*super().keeps(), 'functions', 'failed', 'left')

    def power_on(self, mine):
        super().power_on(mine)
        mine.update(functions=list(self.functions), left={})

    def settle(self, mine):
        """End a programming operation whose time is over.

        Any process that reads the state does this first. Hence an operation
        continues, as with hardware, if the process that began it is killed.
        """
        program = mine['program']
        if not program or time.time() < program['until']:
            return
        mine['program'] = None
        if program['error']:
            # the kernel leaves the bridge of the port disabled
            line = PR_ERRORS[program['error']]
            mine.update(manager='write complete error',
                        status=[line] if line else [])
        else:
            mine.update(manager='operating', status=[])
            mine['functions'][program['port']] = program['function']
            card.forget(
                mine, program['port'], 'registers', *program['clears'])
            mine['disabled'][str(program['port'])] -= 1

    # Operations

    def drivers(self):
        return {'dfl-pci', 'vfio-pci'}

    def is_busy(self, mine):
        return bool(mine['program'])

    def is_ofs(self) -> bool:
        """Return whether the card is like one of the Open FPGA Stack (OFS),
        which has a *slot*: a port in the list of the FME whose AFU is in the
        VFs.

        The port is a device of the PF without afu_id (FME_PORT_OFST_BAR_SKIP
        in dfl-pci.c of Linux 5.19; parse_feature_fiu() in dfl.c, with NEXT_AFU
        0; port_afu_attrs_visible() in dfl-afu-main.c). Mainline Linux creates
        as many VFs as ports were released (dfl_fpga_cdev_config_ports_vf() in
        dfl.c). The fork linux-dfl (github.com/OFS) creates any number of VFs
        if no port was released. The driver binds to a VF that begins with an
        AFU (find_dfls_by_default()), but shows no attributes of the AFU.
        """
        return self.ids[1] == 'bcce'

    def bound(self, state, mine, driver):
        super().bound(state, mine, driver)
        mine.update(released=[], lost=[], disabled={}, status=[],
                    manager='unknown')

    def check_vfs(self, mine, count):
        if mine['driver'] != 'dfl-pci':
            raise sysfs.error(errno.ENODEV, self.address)
        super().check_vfs(mine, count)
        # dfl_fpga_cdev_config_ports_vf() in dfl.c
        if count and not mine['vfs'] and count != len(mine['released']) and (
                mine['released'] or not self.afu_vfs):
            raise sysfs.error(errno.EINVAL, self.address)

    def make_vfs(self, state, mine, count):
        mine['vfs'] = [{'port': port, 'driver': 'dfl-pci',
                        'number': card.number(state)}
                       for port in ([None] * count if self.afu_vfs
                                    else sorted(mine['released']))]

    def outcome(self, mine, faults, payload):
        """Return how a programming operation ends: (name of the error or None,
        seconds until the end)."""
        seconds = self.programming_seconds
        count = faults.get('pr_error_count')
        error = faults.get('pr_error')
        if error and (count is None or mine['failed'] < count):
            mine['failed'] += 1
        elif faults.get('dead'):
            error = 'timeout'
        else:
            wanted = uuid.UUID(faults.get('accept_id') or self.interface)
            fits = (len(payload) == 32
                    and uuid.UUID(bytes_le=payload[16:]) == wanted)
            error = None if fits else 'incompatible'
        if error == 'timeout':
            seconds = self.timeout_seconds
        if faults.get('hang') == 'program':
            error, seconds = 'timeout', card.NEVER
        return error, seconds

    # Sysfs

    def add_physical(self, tree, mine, function):
        if mine['driver'] != 'dfl-pci':
            return
        faults = self.faulty(mine)
        count, dead = mine['number'], faults.get('dead')
        base = _base_region(tree, self.place(), function, count)
        top = f'{self.place()}/fpga_region/region{count}'
        status = '\n'.join(mine['status'])
        manager = {f'fpga{count}': {'name': 'DFL FME FPGA Manager',
                                    'state': mine['manager'],
                                    'status': status}}
        fme: sysfs.Directory = {
            'dev': f'245:{count}',
            'ports_num': '7' if dead else str(self.ports),
            'bitstream_id': f'0x{"f" * 16}' if dead else self.shell,
            'bitstream_metadata': f'0x{"f" * 16}' if dead else '0x17091911',
            f'dfl-fme-mgr.{count}': {'fpga_manager': manager},
            'errors': dict.fromkeys((
                'fme_errors', 'pcie0_errors', 'pcie1_errors',
                'nonfatal_errors', 'catfatal_errors'), '0x0'),
            'hwmon': {f'hwmon{count}': {
                'name': 'dfl_fme_thermal', 'temp1_input': '42000',
                'temp1_max_alarm': '0', 'temp1_crit_alarm': '0'}},
        }
        base[f'dfl-fme.{count}'] = fme
        tree['class']['fpga_manager'][f'fpga{count}'] = sysfs.Link(
            f'{top}/dfl-fme.{count}/dfl-fme-mgr.{count}/fpga_manager/'
            f'fpga{count}')
        for port in range(self.ports):
            name, at = f'dfl-fme-region.{count + port}', count + 1 + port
            fme[name] = {'fpga_region': {f'region{at}': {
                'compat_id': _ALL_ONES if dead else self.interface}}}
            fme[f'dfl-fme-bridge.{count + port}.auto'] = {
                'fpga_bridge': {f'br{count + port}': {}}}
            tree['class']['fpga_region'][f'region{at}'] = sysfs.Link(
                f'{top}/dfl-fme.{count}/{name}/fpga_region/region{at}')
            if port in mine['lost']:
                base[f'dfl-port.{count + port}'] = {
                    'dev': f'244:{count + port}'}
            elif port not in mine['released']:
                made = base[f'dfl-port.{count + port}'] = _port(
                    mine, faults, port, mine['disabled'].get(str(port)))
                if self.is_ofs():
                    del made['afu_id']

    def add_virtual(self, tree, mine, n, function):
        vf = mine['vfs'][n]
        if vf['driver'] == 'dfl-pci' and vf['port'] is not None:
            base = _base_region(tree, self.place(self.vf_address(n)), function,
                                vf['number'])
            base[f'dfl-port.{vf["number"]}'] = _port(
                mine, self.faulty(mine), vf['port'],
                # the disable count of a VF is its own, and programming through
                # the PF ignores it
                vf.get('stuck') == vf['number'])


def _base_region(tree, place, function, count):
    name = f'region{count}'
    base: sysfs.Directory = {'compat_id': sysfs.Errno(errno.ENOENT)}
    function['fpga_region'] = {name: base}
    tree['class']['fpga_region'][name] = sysfs.Link(
        f'{place}/fpga_region/{name}')
    return base


def _port(mine, faults, port, is_disabled):
    if is_disabled:
        function: str | sysfs.Errno = sysfs.Errno(errno.EBUSY)
    else:
        function = (_ALL_ONES if faults.get('dead')
                    else mine['functions'][port])
    made: sysfs.Directory = {
        'id': str(port), 'afu_id': function, 'power_state': '0x0',
        'errors': {}}
    if faults.get('port_errors'):
        made['errors']['errors'] = mine['errors'].get(
            str(port), faults['port_errors'])
    return made


_driver = reader.checked(lambda v: v in (None, 'dfl-pci', 'vfio-pci'),
                         'dfl-pci, vfio-pci or null')


class DflOperations(card.Operations):
    """Operations of a simulated kernel on DFL cards."""

    def program_dfl_port(self, pf, port, path, offset, size):
        # errors: fme_pr() in dfl-fme-pr.c, fme_mgr_write() in dfl-fme-mgr.c
        with open(path, 'rb') as file:
            file.seek(offset)
            payload = file.read(32)
            clears = file.read(len(_CLEARS_MEMORY)) == _CLEARS_MEMORY
        if size == 0 or offset + size > os.path.getsize(path):
            raise sysfs.error(errno.EINVAL, path)
        found, error, seconds = self._begin_program(
            pf, port, payload, size, ['memory'] * clears)
        self._await_program(found, seconds)
        if error:
            raise sysfs.error(
                errno.ETIMEDOUT if error == 'timeout' else errno.EIO, pf)

    @card.blocking
    def _begin_program(self, host, state, pf, port, payload, size, clears):
        """Return (card, name of the error or None, seconds until the end)."""
        found, mine = self._bound_card(host, state, pf, port)
        faults = found.faulty(mine)
        if faults.get('busy'):
            raise sysfs.error(errno.EBUSY, pf)
        if mine['program']:
            # the kernel holds a mutex of the FME during a programming
            raise BlockingIOError
        error, seconds = found.outcome(mine, faults, payload[:size])
        disabled = mine['disabled']
        disabled[str(port)] = disabled.get(str(port), 0) + 1
        mine.update(manager='write', status=[], program={
            'port': port, 'until': min(time.time() + seconds, card.NEVER),
            'error': error, 'clears': clears,
            'function': (None if error
                         else uuid.UUID(bytes_le=payload[:16]).hex)})
        return found, error, seconds

    def clear_dfl_port_errors(self, function, port):
        with self._update() as (host, state):
            _, mine, _ = self._owner(host, state, function)
            mine['errors'][str(port)] = '0x0'

    def read_afu(self, function):
        # DFH, GUID_L and GUID_H in dfl.h. The first VF shows the UUID in the
        # file, as each VF has an AFU of its own. A dead card reads as another
        # type
        found, mine, vf = self._owner(*self._look(), function)
        if (vf is None or not found.afu_vfs or mine['program']
                or mine['disabled'].get('0')
                or found.faulty(mine).get('dead')):
            raise sysfs.error(errno.ENODEV, function)
        loaded = uuid.UUID(mine['functions'][0])
        return (uuid.uuid5(loaded, str(vf)) if vf else loaded).hex

    def reset_dfl_port(self, function, port):
        with self._update() as (host, state):
            found, mine, vf = self._owner(host, state, function)
            shown = mine if vf is None else mine['vfs'][vf]
            if shown['driver'] != 'dfl-pci' or not (
                    port not in mine['released'] if vf is None
                    else port == shown['port']):
                raise sysfs.error(errno.ENODEV, function)
            faults = found.faulty(mine)
            failure = faults.get('port_reset') or (
                'EBUSY' if mine['program'] else None) or (
                'ETIMEDOUT' if faults.get('dead') else None)
            if failure == 'ETIMEDOUT':
                # __afu_port_disable() in dfl-afu-main.c increments the count,
                # waits 1 ms, and does not decrement it; binding the function
                # again resets it
                if vf is None:
                    mine['disabled'][str(port)] = 1 + mine['disabled'].get(
                        str(port), 0)
                else:
                    shown['stuck'] = shown['number']
            if not failure:
                card.forget(mine, port, 'registers')
        if failure:
            raise sysfs.error(getattr(errno, failure), function)

    def release_dfl_port(self, pf, port):
        # dfl_fpga_cdev_release_port() in dfl.c
        with self._update() as (host, state):
            _, mine = self._bound_card(host, state, pf, port)
            if port in mine['released']:
                raise sysfs.error(errno.EBUSY, f'port {port} of {pf}')
            mine['released'].append(port)

    def assign_dfl_port(self, pf, port):
        # dfl_fpga_cdev_assign_port() in dfl.c
        with self._update() as (host, state):
            _, mine = self._bound_card(host, state, pf, port)
            if (port not in mine['released']
                    or port in [vf['port'] for vf in mine['vfs']]):
                raise sysfs.error(errno.EBUSY, f'port {port} of {pf}')
            mine['released'].remove(port)
            # Linux 6.12 recreates the port's device without a driver
            mine['lost'].append(port)

    def _bound_card(self, host, state, pf, port):
        """Return (card, its state) of a physical function with the port."""
        found, mine, vf = self._owner(host, state, pf)
        if (not isinstance(found, DflCard) or vf is not None
                or mine['driver'] != 'dfl-pci'):
            raise sysfs.error(errno.ENODEV, pf)
        if not 0 <= port < found.ports:
            raise sysfs.error(errno.EINVAL, f'port {port} of {pf}')
        return found, mine


def make_gbs(path: str, function: str, interface: str, size: int = 4096,
             payload_function: str | None = None,
             payload_interface: str | None = None,
             name: str = 'simulated', clears_memory: bool = False) -> None:
    """Write a GBS file for programming a simulated card.

    The payload has the format of simulated cards: UUIDs of function and region
    type, 16 bytes little-endian each, then padding. A real card refuses it.

    :param function: UUID of the function in the metadata.
    :param interface: UUID of the region type in the metadata.
    :param size: length of the payload in bytes.
    :param payload_function: function in the payload, if it differs.
    :param payload_interface: region type in the payload, if it differs.
    :param clears_memory: whether the bitstream clears the memory of the card.
    :raises ValueError: a UUID is malformed.
    """
    metadata = json.dumps({'version': 1, 'afu-image': {
        'magic-no': 488605312,
        'interface-uuid': str(uuid.UUID(interface)),
        'power': 0,
        'afu-top-interface': {'class': 'ccip_std_afu'},
        'accelerator-clusters': [{
            'name': name, 'total-contexts': 1,
            'accelerator-type-uuid': str(uuid.UUID(function))}],
    }}).encode()
    payload = (uuid.UUID(payload_function or function).bytes_le
               + uuid.UUID(payload_interface or interface).bytes_le
               + _CLEARS_MEMORY * clears_memory)
    with open(path, 'wb') as file:
        file.write(_GUID + struct.pack('<I', len(metadata)) + metadata)
        file.write(payload.ljust(size, b'\xa5'))
