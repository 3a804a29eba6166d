# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A simulated kernel on which tests act as guests, operators and the kernel
itself, and see what no driver sees."""

import errno
import os
import time

from nova_accel.host import firmware
from nova_accel import model
from nova_accel import sim
from nova_accel.sim import nvme
from nova_accel.sim import tree as sysfs
from nova_accel.sim import xrt

#: requests of the mailbox: LOAD_XCLBIN_KADDR and LOAD_XCLBIN_SLOT_KADDR, which
#: are accepted because xocl had the card before; LOAD_XCLBIN and
#: LOAD_SLOT_XCLBIN
_KADDR_REQUESTS, _LOAD_REQUESTS = 1 << 7 | 1 << 17, 1 << 8 | 1 << 18


class Kernel(sim.SimulatedKernel):

    # NVMe disks

    def use_disk(self, address: str, use: str | None) -> None:
        """Let the host use the disk, for example mount it.

        If the disk is a VF, only check_disks() detects the use.

        :param use: a use that the description of a host can have, or None to
            end the use.
        """
        with self._update() as (host, state):
            _, mine, vf = self._owner(host, state, address)
            (mine if vf is None else mine['vfs'][vf])['use'] = (
                use and nvme._use(use))

    def set_secondary(self, pf: str, vf: int, online: bool,
                      resources: tuple[int, int] = nvme._RESOURCES) -> None:
        """Bring the controller of a VF online with resources, or take it
        offline, which releases its resources.

        :param vf: number of the VF, from 1.
        :param resources: queues and interrupts.
        """
        with self._update() as (_, state):
            nvme._set_online(
                state['cards'][pf]['vfs'][vf - 1], online, resources)

    def share_namespaces(self, pf: str, vf: int, *others: int) -> None:
        """Share the namespaces of a VF with other controllers.

        :param vf: number of the VF, from 1.
        :param others: numbers of VFs, 0 for the PF, whose controllers share
            the namespaces from now on. Without numbers, none of them do.
        """
        with self._update() as (_, state):
            state['cards'][pf]['shared'][str(vf)] = list(others)

    def change_disk(self, address: str, **changes) -> None:
        """Change serial, firmware or namespaces, as a guest or operator can.

        :param changes: the new values by name. The value of namespaces is a
            list with four items for each namespace: the number of blocks, the
            bytes of data and of metadata in a block, and whether the namespace
            is attached.
        """
        with self._update() as (_, state):
            for name, value in changes.items():
                if name not in ('serial', 'firmware', 'namespaces'):
                    raise ValueError(f'{name} of a disk cannot be changed')
                state['cards'][address][name] = value

    def sanitize_disk(self, address: str, method: str, seconds: float = 0,
                      ) -> None:
        """Begin a sanitize operation, as a guest with the disk could."""
        with self._update() as (_, state):
            state['cards'][address]['sanitize'] = {
                'state': 'running', 'method': method,
                'until': time.time() + seconds}

    def write_disk(self, address: str, data: str) -> None:
        """Write data to a disk or to the namespaces of a VF, like a guest."""
        with self._update() as (host, state):
            mine, vf = _media(host, state, address)
            if vf is None:
                mine['data'] = data
                mine['writes'] += 1
            else:
                mine['vf_data'][vf] = data

    def sign_disk(self, address: str, *kinds: str) -> None:
        """Write signatures to a disk, as mkfs and similar tools do.

        :param kinds: types as in the output of wipefs. Without types, erase
            all signatures, like wipefs --all.
        """
        with self._update() as (host, state):
            mine, _ = _media(host, state, address)
            mine.update(signatures=list(kinds), writes=mine['writes'] + 1)

    def data_of_disk(self, address: str) -> str:
        """Return the data that a server with this disk or VF can read."""
        mine, vf = _media(*self._look(), address)
        own = mine['data'] if vf is None else mine['vf_data'].get(vf, '')
        return own + ''.join(
            mine['vf_data'].get(owner, '')
            for owner, others in mine['shared'].items()
            if int(vf or 0) in others)

    # Time cards

    def change_timecard(self, address: str, **changes: str) -> None:
        """Change serial, firmware or a setting, like a guest."""
        with self._update() as (_, state):
            mine = state['cards'][address]
            for name, value in changes.items():
                if name in ('serial', 'firmware'):
                    mine[name] = value
                else:
                    mine['settings'][name] = value

    # FPGA cards

    def guest_loads(self, pf: str, function: str) -> None:
        """Let a guest that has the whole card program port 0, by the card's
        FME.

        :raises OSError: ENODEV if no guest has the physical function.
        """
        with self._update() as (host, state):
            _, mine, vf = self._owner(host, state, pf)
            if vf is not None or pf not in state['guests']:
                raise sysfs.error(errno.ENODEV, pf)
            mine['functions'][0] = model.uuid_hex(function)

    # Cards under XRT

    def guest_programs(self, user, path):
        """Let a guest program its card by xocl, the driver in the guest. Since
        XRT 2.15, xocl does this whenever an application opens a function.

        xocl ignores a closed mailbox (mailbox_request(): EFAULT), and fails
        after 50 seconds without a compute unit. Sources:
        __icap_peer_xclbin_download() in icap.c for xocl; xclmgmt_mailbox_srv()
        in mgmt-core.c for xclmgmt, and xclmgmt_xclbin_fetch_and_download() in
        mgmt-utils.c if xclmgmt fetches files from the host.

        :param user: PCI address of the user function.
        :raises OSError: ETIMEDOUT if the mailbox refuses the request, ENOENT
            if the host has no such file.
        """
        host, state = self._look()
        found, mine, _ = self._owner(host, state, user)
        with open(path, 'rb') as file:
            data = file.read()
        if user not in state['guests'] or mine['driver'] != 'xclmgmt':
            raise sysfs.error(errno.ETIMEDOUT, user)
        if mine['mailbox'] & _KADDR_REQUESTS == _KADDR_REQUESTS:
            if mine['mailbox'] & _LOAD_REQUESTS == _LOAD_REQUESTS:
                raise sysfs.error(errno.ETIMEDOUT, user)
            if mine['fetches']:
                # request_firmware(): ENOENT
                with open(os.path.join(self._xclbins(), firmware.file_name(
                        xrt._read_xclbin(data)[0],
                        found.interfaces[min(1, len(found.interfaces) - 1)]
                        )), 'rb') as file:
                    data = file.read()
        self._load_xclbin(found.address, data)

    def loaded_xclbin(self, function):
        """Return the UUID of the loaded function, or None, as the card has it.
        No driver shows this UUID."""
        loaded = self._look()[1]['cards'][function]['loaded']
        return loaded and loaded['function']

    def opens_mailbox(self, function):
        """Make the mailbox accept all requests, as after binding xclmgmt."""
        with self._update() as (_, state):
            state['cards'][function].update(mailbox=0, fetches=False)

    def xocl_programs(self, user, path):
        """Program the card from the host, like xrt-smi program."""
        found, _, _ = self._owner(*self._look(), user)
        with open(path, 'rb') as file:
            data = file.read()
        self._load_xclbin(found.address, data)
        with self._update() as (_, state):
            mine = state['cards'][found.address]
            mine['shown'] = [mine['vfs'][0]['number'],
                             xrt._read_xclbin(data)[0]]

    # Any card

    def says(self, subsystem: str, function: str, said: str) -> None:
        """Simulate an event of the kernel, see host.kernel.Change."""
        with self._update() as (_, state):
            state['said'].append([subsystem, function, said])

    def resets(self, address: str) -> list[list]:
        """Return the resets of a card: [function, its driver at that time]."""
        return self._look()[1]['cards'][address]['resets']

    def disturbed(self) -> list[str]:
        """Return the functions that were reset while a guest had them open."""
        return self._look()[1]['disturbed']


def _media(host, state, address):
    """Return where the state has the data of a disk or VF: (state of the
    card, number of the VF as text, or None for the whole disk)."""
    for pf, found in host.cards.items():
        if address in found.addresses():
            vf = found.addresses().index(address)
            return state['cards'][pf], str(vf) if vf else None
    raise KeyError(address)
