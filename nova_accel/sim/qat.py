# Licensed under the Apache License, Version 2.0. See LICENSE.
"""QAT cards under the kernel's drivers, from the sources of Linux 6.16.

Below drivers/crypto/intel/qat/qat_common: state and services from adf_sysfs.c,
VFs from adf_sriov.c, the heartbeat from adf_heartbeat.c, errors from
adf_sysfs_ras_counters.c.
"""

import dataclasses
import errno
import time
from typing import ClassVar

from nova_accel.sim import card
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs

#: product -> device ids of PF and VF, their drivers, number of VFs, maximum
#: number of simultaneous services (0: they cannot be set)
PRODUCTS = {
    'DH895XCC': ('0435', '0443', 'dh895xcc', 'dh895xccvf', 32, 0),
    'C62X': ('37c8', '37c9', 'c6xx', 'c6xxvf', 16, 0),
    'C3XXX': ('19e2', '19e3', 'c3xxx', 'c3xxxvf', 16, 0),
    '4XXX': ('4940', '4941', '4xxx', '4xxxvf', 16, 2),
    '420XX': ('4946', '4947', '420xx', '420xxvf', 16, 2),
    '6XXX': ('4948', '4949', '6xxx', '6xxxvf', 16, 3),
}
#: services in the order in which the kernel writes them
_SERVICES = ('asym', 'sym', 'dc', 'decomp', 'dcc')
#: minimum seconds between two counted reads of the heartbeat
_TIMER = 0.2
#: unanswered reads after which the card counts as dead
_THRESHOLD = 3


@dataclasses.dataclass(frozen=True)
class QatCard(card.Card):
    """The physical function of a QAT card."""

    class_code: str = '0x0b4000'
    #: services after a boot of the host
    services: str = 'sym;asym'
    most_services: int = 0

    KEYS: ClassVar[dict] = {'services': reader.text}
    READ: ClassVar[frozenset[str]] = frozenset(('asked', 'missed'))
    FAULTS: ClassVar[dict] = {
        **card.Card.FAULTS,
        # the host itself uses the card
        'busy': reader.boolean,
        # services with which the card does not start, for lack of firmware
        'fails_with': reader.text,
        # 'silent', or the error of reading it, as for an attribute
        'heartbeat': reader.text,
        'errors_fatal': reader.natural,
    }

    @classmethod
    def describe(cls, item):
        device, vf_device, driver, vf_driver, total, most = PRODUCTS[
            item.take('product', reader.one_of(*PRODUCTS), '4XXX')]
        return {'driver': driver, **cls.describe_any(item),
                'ids': ('8086', device, '8086', '0000'),
                'vf_device': vf_device, 'vf_driver': vf_driver,
                'total_vfs': total, 'most_services': most,
                'vfs': item.take('vfs', reader.up_to(total), 0)}

    # State

    def fresh(self, state):
        return {**super().fresh(state), **self._started()}

    def _started(self):
        return {'state': 'up', 'services': self.services, 'asked': 0,
                'missed': 0}

    def bound(self, state, mine, driver):
        super().bound(state, mine, driver)
        mine.update(self._started())

    # Operations

    def check_vfs(self, mine, count):
        if self.faulty(mine).get('busy'):
            raise sysfs.error(errno.EBUSY, self.address)
        super().check_vfs(mine, count)

    def make_vfs(self, state, mine, count):
        # the driver creates all VFs, whatever the number
        super().make_vfs(state, mine, self.total_vfs)

    def ends_vfs(self, attribute, value):
        return attribute == 'qat/state' and value == 'down'

    def write(self, mine, vf, attribute, value):
        if vf is not None or not self._has_attributes(mine):
            raise sysfs.error(errno.ENOENT, f'{self.address}/{attribute}')
        if attribute == 'qat/state':
            self._switch(mine, value)
        elif attribute == 'qat/cfg_services':
            services = self._accepted(value)
            if mine['state'] == 'up':
                raise sysfs.error(errno.EINVAL, self.address)
            mine['services'] = services
        else:
            super().write(mine, vf, attribute, value)

    def _has_attributes(self, mine):
        return self.most_services and mine['driver'] == self.driver

    def _switch(self, mine, value):
        if self.faulty(mine).get('busy'):
            raise sysfs.error(errno.EBUSY, self.address)
        if value == 'down':
            if mine['state'] == 'down':
                # newer kernels accept this
                raise sysfs.error(errno.EINVAL, self.address)
            mine.update(state='down', vfs=[])
        elif self.faulty(mine).get('fails_with') == mine['services']:
            raise sysfs.error(errno.EFAULT, self.address)
        else:
            mine['state'] = 'up'

    def _accepted(self, text):
        services = text.split(';')
        chosen = set(services)
        alone = self.most_services == 2 and 'decomp' in chosen
        if (not chosen <= set(_SERVICES) or len(chosen) != len(services)
                or len(chosen) > self.most_services or alone
                or 'dcc' in chosen and len(chosen) > 1):
            raise sysfs.error(errno.EINVAL, self.address)
        return ';'.join(s for s in _SERVICES if s in chosen)

    def heartbeat(self, mine) -> int:
        """Return the present value of the heartbeat in debugfs.

        :raises OSError: it cannot be read.
        """
        fault = self.faulty(mine).get('heartbeat')
        number: int = errno.ENOENT
        if fault not in (None, 'silent'):
            number = reader.attribute_fault(fault) or errno.ENOENT
        elif mine['driver'] == self.driver and mine['state'] == 'up':
            now = time.time()
            if now - mine['asked'] < _TIMER:
                return -1
            mine.update(asked=now,
                        missed=mine['missed'] + 1 if fault else 0)
            return -1 if mine['missed'] >= _THRESHOLD else 0
        raise sysfs.error(number, self.address)

    # Sysfs

    def add_physical(self, tree, mine, function):
        if not self._has_attributes(mine):
            return
        function['qat'] = {
            'state': mine['state'], 'cfg_services': mine['services'],
            'num_rps': '64', 'pm_idle_enabled': '1', 'auto_reset': 'off',
            # readable only after the number of a ring was written to it
            'rp2srv': sysfs.Errno(errno.EINVAL)}
        if mine['state'] == 'up':
            function['qat_ras'] = {
                'errors_correctable': '0', 'errors_nonfatal': '0',
                'errors_fatal': str(
                    self.faulty(mine).get('errors_fatal') or 0)}


class QatOperations(card.Operations):
    """Operations of a simulated kernel on QAT cards."""

    def read_qat_heartbeat(self, pf):
        with self._update() as (host, state):
            found, mine, vf = self._owner(host, state, pf)
            if not isinstance(found, QatCard) or vf is not None:
                raise sysfs.error(errno.ENOENT, pf)
            return found.heartbeat(mine)
