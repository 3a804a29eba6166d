# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A kernel that is not there, with cards that behave.

It answers as Linux 6.12 with the DFL drivers was seen to answer, including
what goes wrong. What a card or kernel remembers is kept in ``<file>.state``
beside the description, so that all processes see the same cards. Time passes
for real: programming sleeps, and holds no lock while it does.
"""

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
import uuid

from nova_accel import exception
from nova_accel.sim import description

_ALL_ONES = 'f' * 32
_PCI = 'bus/pci/devices'
#: seconds between two looks at something that blocks
_TICK = 0.02
_NEVER = 1e12


class _Link(str):
    """A symbolic link, by the path of its target below /sys."""


class _Errno(int):
    """An attribute that cannot be read."""


class SimulatedKernel:
    """Stands where nova_accel.host.kernel.Kernel stands; same methods.

    Thread-safe, and any number of processes may use one file.
    """

    def __init__(self, path: str):
        """:param path: the description, a YAML file.

        :raises InvalidSimulation: naming file, line and key.
        """
        self.path = os.path.abspath(path)
        self._state_path = f'{self.path}.state'
        # guards what is remembered of the files; never held while waiting
        self._lock = threading.RLock()
        self._description = self._state = self._sys = (None,) * 3
        self._described()
        try:
            with self._update():
                pass
        except OSError as e:
            raise exception.InvalidSimulation(
                f'The state of the simulated host {path} cannot be kept '
                f'beside it ({e}): put the file where nova-compute may '
                f'write.') from e
        except (ValueError, KeyError, TypeError) as e:
            raise exception.InvalidSimulation(
                f'{self._state_path} is not what this release wrote '
                f'({e!r}): remove it.') from e

    # Reads, see Kernel

    def read(self, path):
        node = self._attribute(path)
        if isinstance(node, bytes):
            return node.decode(errors='replace')
        return node

    def read_bytes(self, path, size):
        node = self._attribute(path)
        return (node if isinstance(node, bytes) else f'{node}\n'.encode()
                )[:size]

    def listdir(self, path):
        if path.strip('/') == _PCI:
            self._renumber()
        node, _ = _find(self._tree(), path)
        if not isinstance(node, dict):
            raise _error(errno.ENOTDIR, path)
        return sorted(node)

    def exists(self, path):
        try:
            _find(self._tree(), path)
        except OSError:
            return False
        return True

    def readlink(self, path):
        node, place = _find(self._tree(), path, follow_last=False)
        if not isinstance(node, _Link):
            raise _error(errno.EINVAL, path)
        return os.path.relpath(node, os.path.dirname(place))

    def _attribute(self, path):
        node, place = _find(self._tree(), path)
        while self._hangs(place):
            time.sleep(_TICK)
        if isinstance(node, dict):
            raise _error(errno.EISDIR, path)
        if isinstance(node, _Errno):
            raise _error(node, path)
        return node

    def _hangs(self, place):
        host, state = self._look()
        return any(_faults(card, state).get('hang') == 'read'
                   and f'/{address}/' in place
                   for address, card in host.cards.items())

    # Operations, see Kernel

    def program_dfl_port(self, pf, port, path, offset, size):
        with open(path, 'rb') as file:
            file.seek(offset)
            payload = file.read(32)
        if size == 0 or offset + size > os.path.getsize(path):
            raise _error(errno.EINVAL, path)
        while True:
            with self._update() as (host, state):
                card = _bound(host, state, pf)
                mine = state['cards'][pf]
                if not 0 <= port < card.ports:
                    raise _error(errno.EINVAL, f'port {port} of {pf}')
                faults = _faults(card, state)
                if faults.get('busy'):
                    raise _error(errno.EBUSY, pf)
                if not mine['program']:
                    error, seconds = _outcome(card, mine, faults,
                                              payload[:size])
                    _begin(mine, port, payload, error, time.time() + seconds)
                    break
            # the kernel holds a mutex of the FME meanwhile
            time.sleep(_TICK)
        while True:
            time.sleep(min(seconds, _TICK))
            _, state = self._look()
            program = state['cards'][pf]['program']
            if not program:
                break
            if (program['until'] == _NEVER
                    and _faults(card, state).get('hang') != 'program'):
                with self._update() as (_, state):
                    state['cards'][pf]['program']['until'] = time.time()
        if error == 'timeout':
            raise _error(errno.ETIMEDOUT, pf)
        if error:
            raise _error(errno.EIO, pf)

    def clear_dfl_port_errors(self, function, port):
        with self._update() as (host, state):
            card, _ = _owner(host, state, function)
            state['cards'][card.address]['errors'][str(port)] = '0x0'

    def release_dfl_port(self, pf, port):
        with self._update() as (host, state):
            card = _bound(host, state, pf)
            if not 0 <= port < card.ports:
                raise _error(errno.EINVAL, f'port {port} of {pf}')
            released = state['cards'][pf]['released']
            if port in released:
                raise _error(errno.EBUSY, f'port {port} of {pf}')
            released.append(port)

    def assign_dfl_port(self, pf, port):
        with self._update() as (host, state):
            card = _bound(host, state, pf)
            if not 0 <= port < card.ports:
                raise _error(errno.EINVAL, f'port {port} of {pf}')
            mine = state['cards'][pf]
            if (port not in mine['released']
                    or port in [vf['port'] for vf in mine['vfs']]):
                raise _error(errno.EBUSY, f'port {port} of {pf}')
            mine['released'].remove(port)
            # Linux 6.12 makes the port's device again, but no driver takes it
            mine['lost'].append(port)

    def rebind(self, function, driver):
        if driver not in ('dfl-pci', 'vfio-pci'):
            raise _error(errno.EINVAL, driver)
        while True:
            with self._update() as (host, state):
                if _rebind(host, state, function, driver):
                    return
            time.sleep(_TICK)

    def set_numvfs(self, pf, count):
        while True:
            with self._update() as (host, state):
                card = _bound(host, state, pf)
                mine = state['cards'][pf]
                if card.ids[3] is None:
                    raise _error(errno.ENOENT, pf)
                if not 0 <= count <= card.ports:
                    raise _error(errno.ERANGE, pf)
                if count == len(mine['vfs']):
                    return
                if count and mine['vfs']:
                    raise _error(errno.EBUSY, pf)
                if count and count != len(mine['released']):
                    raise _error(errno.EINVAL, pf)
                if count or not _held(card, state):
                    mine['vfs'] = []
                    if count:
                        _enable_vfs(state, mine)
                    return
            time.sleep(_TICK)

    # What tests and demonstrations do to the host

    def set_fault(self, address: str, **fault) -> None:
        """Give a card faults, or with None take them away.

        Names and values as under ``faults`` in the description.

        :raises KeyError: when there is no such card.
        :raises ValueError: when a fault is none.
        """
        checked = {}
        for name, value in fault.items():
            try:
                checked[name] = description.fault(name, value)
            except ValueError as e:
                raise ValueError(f'{name} {e}') from None
        with self._update() as (_, state):
            mine = state['cards'][address]
            mine['faults'].update(checked)
            mine['failed'] = 0
            if 'port_errors' in fault:
                mine['errors'] = {}

    def guest_takes(self, address: str) -> None:
        """Give a function to a guest, as libvirt does for a managed hostdev.

        :raises OSError: EPERM when its IOMMU group is not viable, ENODEV when
            there is no such function, EBUSY when a guest has it.
        """
        tree = self._tree()
        group, _ = _find(tree, f'{_PCI}/{address}/iommu_group/devices')
        for member in group:
            function, _ = _find(tree, f'{_PCI}/{member}')
            if member != address and os.path.basename(
                    function.get('driver', 'vfio-pci')) != 'vfio-pci':
                raise _error(errno.EPERM, f'the IOMMU group of {address}')
        while True:
            with self._update() as (host, state):
                if address in state['guests']:
                    raise _error(errno.EBUSY, address)
                if _rebind(host, state, address, 'vfio-pci'):
                    state['guests'].append(address)
                    return
            time.sleep(_TICK)

    def guest_returns(self, address: str) -> None:
        """Undo guest_takes."""
        with self._update() as (host, state):
            state['guests'].remove(address)
            _rebind(host, state, address, 'dfl-pci')

    def reboot(self) -> None:
        """Forget what a kernel forgets; the cards keep their functions."""
        with self._update() as (host, state):
            state['guests'] = []
            for address, card in host.cards.items():
                mine = state['cards'][address]
                fresh = _new_card(state, card)
                for name in ('functions', 'faults', 'failed'):
                    fresh[name] = mine[name]
                state['cards'][address] = fresh

    def power_cycle(self) -> None:
        """reboot(), and the cards come up with the functions they ship with.

        A dead card answers again.
        """
        self.reboot()
        with self._update() as (host, state):
            for address, card in host.cards.items():
                mine = state['cards'][address]
                mine['functions'] = list(card.functions)
                mine['faults'].pop('dead', None)

    # The state

    def _described(self):
        """The description, read again when the file changed."""
        with self._lock:
            stamp = _stamp(self.path)
            if self._description[0] != stamp or stamp is None:
                self._description = stamp, description.load(self.path)
            return self._description[1]

    def _look(self):
        """(description, state) of now; not to be changed."""
        with self._lock:
            host = self._described()
            stamp = _stamp(self._state_path)
            if self._state[0] != stamp or self._state[1] is not host:
                self._state = stamp, host, self._load(host)
            state = self._state[2]
            _settle(state)
            return host, state

    def _load(self, host):
        try:
            with open(self._state_path, encoding='utf-8') as file:
                state = json.load(file)
        except FileNotFoundError:
            state = {'number': 0, 'guests': [], 'cards': {}}
        for address, card in host.cards.items():
            if address not in state['cards']:
                mine = state['cards'][address] = _new_card(state, card)
                if card.vfs and mine['driver'] == 'dfl-pci':
                    mine['released'] = list(range(card.vfs))
                    _enable_vfs(state, mine)
        return state

    @contextlib.contextmanager
    def _update(self):
        """(description, state) to change; kept unless the caller raises."""
        with open(f'{self._state_path}.lock', 'w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            host = self._described()
            state = self._load(host)
            before = json.dumps(state)
            _settle(state)
            yield host, state
            after = json.dumps(state)
            if after != before or not os.path.exists(self._state_path):
                fresh = f'{self._state_path}.new'
                with open(fresh, 'w', encoding='utf-8') as file:
                    file.write(after)
                os.replace(fresh, self._state_path)

    def _renumber(self):
        host, state = self._look()
        if any(_faults(card, state).get('renumber')
               for card in host.cards.values()):
            with self._update() as (host, state):
                for address, card in host.cards.items():
                    if _faults(card, state).get('renumber'):
                        mine = state['cards'][address]
                        for function in (mine, *mine['vfs']):
                            function['number'] = _number(state)

    def _tree(self):
        """/sys as nested dictionaries."""
        with self._lock:
            host, state = self._look()
            busy = [bool(mine['program']) for mine in state['cards'].values()]
            if self._sys[0] is not state or self._sys[1] != busy:
                self._sys = state, busy, _build(host, state)
            return self._sys[2]


def _error(number, of):
    return OSError(int(number), os.strerror(number), of)


def _stamp(path):
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _faults(card, state):
    return {**card.faults, **state['cards'][card.address]['faults']}


def _number(state):
    """A number that no device name had before; names of ten may use it."""
    state['number'] += 10
    return state['number']


def _new_card(state, card):
    return {'functions': list(card.functions), 'driver': card.driver,
            'number': _number(state), 'released': [], 'lost': [], 'vfs': [],
            'disabled': {}, 'manager': 'unknown', 'status': [],
            'program': None, 'errors': {}, 'faults': {}, 'failed': 0}


def _enable_vfs(state, mine):
    # without drivers_autoprobe=0 the kernel binds them at once
    mine['vfs'] = [{'port': port, 'driver': 'dfl-pci',
                    'number': _number(state)}
                   for port in sorted(mine['released'])]


def _bind(state, function, driver):
    function['driver'] = driver
    function['number'] = _number(state)


def _rebind(host, state, function, driver) -> bool:
    """Whether it was done: it waits for guests with a VF, and for the FME."""
    card, number = _owner(host, state, function)
    mine = state['cards'][card.address]
    if number is not None:
        _bind(state, mine['vfs'][number], driver)
        return True
    if mine['program'] or _held(card, state):
        return False
    mine.update(vfs=[], released=[], lost=[], disabled={}, status=[],
                manager='unknown')
    _bind(state, mine, driver)
    return True


def _bound(host, state, pf):
    """The card of a PF that is bound to dfl-pci."""
    card = host.cards.get(pf)
    if (card is None or _faults(card, state).get('vanish')
            or state['cards'][pf]['driver'] != 'dfl-pci'):
        raise _error(errno.ENODEV, pf)
    return card


def _owner(host, state, function):
    """(card, number of the VF or None) of a function."""
    for address, card in host.cards.items():
        if _faults(card, state).get('vanish'):
            continue
        if function == address:
            return card, None
        for number in range(len(state['cards'][address]['vfs'])):
            if function == card.vf_address(number):
                return card, number
    raise _error(errno.ENODEV, function)


def _held(card, state):
    """Whether a guest holds a VF of the card."""
    return any(card.vf_address(n) in state['guests']
               for n in range(len(state['cards'][card.address]['vfs'])))


def _outcome(card, mine, faults, payload):
    """(name of the error or None, seconds) of a programming."""
    seconds = card.programming_seconds
    count = faults.get('pr_error_count')
    error = faults.get('pr_error')
    if error and (count is None or mine['failed'] < count):
        mine['failed'] += 1
    elif faults.get('dead'):
        error = 'timeout'
    else:
        wanted = uuid.UUID(faults.get('accept_id') or card.interface)
        fits = (len(payload) == 32
                and uuid.UUID(bytes_le=payload[16:]) == wanted)
        error = None if fits else 'incompatible'
    if error == 'timeout':
        seconds = card.timeout_seconds
    if faults.get('hang') == 'program':
        error, seconds = 'timeout', _NEVER
    return error, seconds


def _begin(mine, port, payload, error, until):
    disabled = mine['disabled']
    disabled[str(port)] = disabled.get(str(port), 0) + 1
    mine.update(manager='write', status=[], program={
        'port': port, 'until': min(until, _NEVER), 'error': error,
        'function': (None if error
                     else uuid.UUID(bytes_le=payload[:16]).hex)})


def _settle(state):
    """End the programming whose time is over.

    Whoever looks first does so: like a real one it goes on when the process
    that began it is killed.
    """
    for mine in state['cards'].values():
        program = mine['program']
        if not program or time.time() < program['until']:
            continue
        mine['program'] = None
        if program['error']:
            # the kernel leaves the bridge of the port disabled
            line = description.PR_ERRORS[program['error']]
            mine.update(manager='write complete error',
                        status=[line] if line else [])
        else:
            mine.update(manager='operating', status=[])
            mine['functions'][program['port']] = program['function']
            mine['disabled'][str(program['port'])] -= 1


def _find(tree, path, follow_last=True):
    """(node, its path without links)."""
    parts = [part for part in path.split('/') if part]
    node, place = tree, []
    links = 0
    while parts:
        name = parts.pop(0)
        if not isinstance(node, dict):
            raise _error(errno.ENOTDIR, path)
        if name not in node:
            raise _error(errno.ENOENT, path)
        node = node[name]
        place.append(name)
        if isinstance(node, _Link) and (parts or follow_last):
            links += 1
            if links > 40:
                raise _error(errno.ELOOP, path)
            parts = node.split('/') + parts
            node, place = tree, []
    return node, '/'.join(place)


def _build(host, state):
    tree = {'bus': {'pci': {'devices': {}, 'drivers': {
                'dfl-pci': {}, 'vfio-pci': {}}}},
            'class': {'fpga_region': {}, 'fpga_manager': {}},
            'devices': {}, 'kernel': {'iommu_groups': {}}}
    group = 1000
    for address, card in host.cards.items():
        faults = _faults(card, state)
        mine = state['cards'][address]
        group += 10
        if faults.get('vanish'):
            continue
        vendor, device, subsystem, vf_device = card.ids
        pf = _add_function(
            tree, host, address, vendor, device, '0x120000', mine['driver'],
            group if card.iommu_group is None else card.iommu_group)
        pf.update(numa_node=str(card.numa_node),
                  subsystem_device=f'0x{subsystem}')
        functions = [pf]
        if faults.get('dead'):
            pf['config'] = b'\xff' * 64
        if mine['driver'] == 'dfl-pci':
            _add_pf(tree, card, mine, faults, pf)
        if vf_device:
            pf.update(sriov_totalvfs=str(card.ports),
                      sriov_numvfs=str(len(mine['vfs'])))
        for n, vf in enumerate(mine['vfs']):
            vf_address = card.vf_address(n)
            made = _add_function(tree, host, vf_address, vendor, vf_device,
                                 '0x120000', vf['driver'], group + 1 + n)
            # by the SR-IOV specification, whatever state the card is in
            made['config'] = b'\xff\xff' + made['config'][2:]
            made['numa_node'] = str(card.numa_node)
            made['physfn'] = _Link(_place(address))
            pf[f'virtfn{n}'] = _Link(_place(vf_address))
            functions.append(made)
            if vf['driver'] == 'dfl-pci':
                base = _base_region(tree, vf_address, made, vf['number'])
                base[f'dfl-port.{vf["number"]}'] = _port(
                    mine, faults, vf['port'], of_pf=False)
        for made in functions:
            _break(made, faults.get('attributes') or {})
    for address, other in host.others.items():
        group += 10
        _add_function(
            tree, host, address, other.vendor, other.device,
            other.class_code, other.driver,
            group if other.iommu_group is None else other.iommu_group)
    return tree


def _place(address):
    return f'devices/pci{address[:7]}/{address}'


def _add_function(tree, host, address, vendor, device, class_code, driver,
                  group):
    ids = bytes.fromhex(vendor)[::-1] + bytes.fromhex(device)[::-1]
    made = {'vendor': f'0x{vendor}', 'device': f'0x{device}',
            'subsystem_vendor': f'0x{vendor}', 'subsystem_device': '0x0000',
            'class': class_code, 'revision': '0x00', 'numa_node': '-1',
            'driver_override': ('vfio-pci' if driver == 'vfio-pci'
                                else '(null)'),
            'config': ids.ljust(64, b'\0')}
    tree['devices'].setdefault(f'pci{address[:7]}', {})[address] = made
    tree['bus']['pci']['devices'][address] = _Link(_place(address))
    if driver:
        made['driver'] = _Link(f'bus/pci/drivers/{driver}')
        tree['bus']['pci']['drivers'].setdefault(driver, {})[address] = (
            _Link(_place(address)))
    if host.iommu:
        made['iommu_group'] = _Link(f'kernel/iommu_groups/{group}')
        tree['kernel']['iommu_groups'].setdefault(
            str(group), {'devices': {}})['devices'][address] = (
                _Link(_place(address)))
    return made


def _base_region(tree, address, function, number):
    """The region that stands for the function; it has no compat_id to give."""
    name = f'region{number}'
    base = {'compat_id': _Errno(errno.ENOENT)}
    function['fpga_region'] = {name: base}
    tree['class']['fpga_region'][name] = _Link(
        f'{_place(address)}/fpga_region/{name}')
    return base


def _add_pf(tree, card, mine, faults, pf):
    number, dead = mine['number'], faults.get('dead')
    base = _base_region(tree, card.address, pf, number)
    top = f'{_place(card.address)}/fpga_region/region{number}'
    status = '\n'.join(mine['status'])
    manager = {f'fpga{number}': {'name': 'DFL FME FPGA Manager',
                                 'state': mine['manager'], 'status': status}}
    fme = base[f'dfl-fme.{number}'] = {
        'dev': f'245:{number}',
        'ports_num': '7' if dead else str(card.ports),
        'bitstream_id': f'0x{"f" * 16}' if dead else card.shell,
        'bitstream_metadata': f'0x{"f" * 16}' if dead else '0x17091911',
        f'dfl-fme-mgr.{number}': {'fpga_manager': manager},
    }
    tree['class']['fpga_manager'][f'fpga{number}'] = _Link(
        f'{top}/dfl-fme.{number}/dfl-fme-mgr.{number}/fpga_manager/'
        f'fpga{number}')
    for port in range(card.ports):
        name, at = f'dfl-fme-region.{number + port}', number + 1 + port
        fme[name] = {'fpga_region': {f'region{at}': {
            'compat_id': _ALL_ONES if dead else card.interface}}}
        fme[f'dfl-fme-bridge.{number + port}.auto'] = {
            'fpga_bridge': {f'br{number + port}': {}}}
        tree['class']['fpga_region'][f'region{at}'] = _Link(
            f'{top}/dfl-fme.{number}/{name}/fpga_region/region{at}')
        if port in mine['lost']:
            base[f'dfl-port.{number + port}'] = {'dev': f'244:{number + port}'}
        elif port not in mine['released']:
            base[f'dfl-port.{number + port}'] = _port(mine, faults, port,
                                                      of_pf=True)


def _port(mine, faults, port, of_pf):
    # a VF has a count of its own, which programming through the PF leaves
    if of_pf and mine['disabled'].get(str(port)):
        function = _Errno(errno.EBUSY)
    else:
        function = (_ALL_ONES if faults.get('dead')
                    else mine['functions'][port])
    made = {'id': str(port), 'afu_id': function, 'power_state': '0x0',
            'errors': {}}
    if faults.get('port_errors'):
        made['errors']['errors'] = mine['errors'].get(
            str(port), faults['port_errors'])
    return made


def _break(node, attributes):
    """Apply the fault "attributes" below a function."""
    for name in list(node):
        if isinstance(node[name], dict):
            _break(node[name], attributes)
        elif name in attributes:
            value = description.attribute_fault(attributes[name])
            if value is None:
                del node[name]
            else:
                node[name] = (_Errno(value) if isinstance(value, int)
                              else value)
