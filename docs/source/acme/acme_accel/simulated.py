"""ACME's cards on a simulated host."""

import dataclasses
import errno
import uuid

from nova_accel.sim import card
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs


@dataclasses.dataclass(frozen=True)
class AcmeCard(card.Card):

    ids: tuple = ('1ac1', '0001', '1ac1', '0000')
    class_code: str = '0x120000'
    driver: str | None = 'acme'
    firmware: str = '12'

    FAULTS = {
        **card.Card.FAULTS,
        # how a scrub fails, or that it does not end
        'scrub': reader.one_of('EIO', 'hang'),
    }

    @classmethod
    def describe(cls, item):
        return dict(cls.describe_any(item),
                    firmware=item.take('firmware', reader.text, '12'))

    def fresh(self, state):
        return {**super().fresh(state), 'power_limit': '250', 'scrubs': 0}

    def add_physical(self, tree, mine, function):
        # the attributes are those of its kernel driver
        if mine['driver'] == self.driver:
            function['acme'] = {
                'firmware': self.firmware, 'power_limit': mine['power_limit'],
                'scrubs': str(mine['scrubs'])}

    def write(self, mine, vf, attribute, value):
        if mine['driver'] != self.driver or attribute != 'acme/power_limit':
            super().write(mine, vf, attribute, value)
        if not 75 <= int(value) <= 300:
            raise sysfs.error(errno.EINVAL, attribute)
        mine['power_limit'] = value

    def scrub(self, mine, vf):
        fault = self.faulty(mine).get('scrub')
        if mine['driver'] != self.driver:
            raise sysfs.error(errno.ENODEV, self.address)
        if fault == 'hang':
            raise BlockingIOError
        if fault:
            raise sysfs.error(getattr(errno, fault), self.address)
        mine['scrubs'] += 1
        card.forget(mine, 0, 'memory')

    OPERATIONS = {'scrub': scrub}


@dataclasses.dataclass(frozen=True)
class AcmeFpgaCard(card.Card):

    ids: tuple = ('1ac1', '0002', '1ac1', '0000')
    class_code: str = '0x120000'
    driver: str | None = 'acme_fpga'
    region_type: str = '1c1a5b1e-0000-4000-8000-000000000001'

    FAULTS = {
        **card.Card.FAULTS,
        'program': reader.one_of('EIO'), 'reset_region': reader.one_of('EIO'),
        'temperature': reader.one_of('hot'),
    }

    def fresh(self, state):
        return {**super().fresh(state), 'function': '', 'resets': 0}

    def add_physical(self, tree, mine, function):
        if mine['driver'] == self.driver:
            function['acme_fpga'] = {
                'region_type': self.region_type, 'function': mine['function'],
                'resets': str(mine['resets']),
                'temperature': self.faulty(mine).get('temperature', 'fine')}

    def _fail(self, mine, name):
        fault = self.faulty(mine).get(name)
        if fault:
            raise sysfs.error(getattr(errno, fault), self.address)

    def program(self, mine, vf, path, offset, size):
        self._fail(mine, 'program')
        with open(path, 'rb') as file:
            head = file.read(offset)
        # of the header, see fpga.HEADER
        mine['function'] = str(uuid.UUID(bytes=head[24:40]))

    def reset_region(self, mine, vf):
        self._fail(mine, 'reset_region')
        mine['resets'] += 1
        card.forget(mine, 0, 'registers')

    OPERATIONS = {'program': program, 'reset_region': reset_region}


@dataclasses.dataclass(frozen=True)
class AcmeDpuCard(card.Card):
    """Two functions: the one at `address`, and the management function."""

    ids: tuple = ('1ac1', '0003', '1ac1', '0000')
    class_code: str = '0x120000'
    driver: str | None = 'acme_dpu'

    FAULTS = {
        **card.Card.FAULTS,
        'reset_dpu': reader.one_of('EIO', 'hang'),
        'state': reader.one_of('booting'),
    }

    @property
    def management(self):
        return f'{self.address[:-1]}1'

    def addresses(self):
        return [self.address, self.management]

    def add_physical(self, tree, mine, function):
        management = sysfs.add_function(
            tree, self.place(self.management),
            ('1ac1', '00f3', '1ac1', '0000'), '0x088000', 'acme_dpu_mgmt',
            None)
        management['acme_dpu'] = {
            'state': self.faulty(mine).get('state', 'ready')}

    def reset_dpu(self, mine, vf):
        fault = self.faulty(mine).get('reset_dpu')
        if fault == 'hang':
            raise BlockingIOError
        if fault:
            raise sysfs.error(getattr(errno, fault), self.address)
        card.forget(mine, 0, 'registers', 'memory')

    OPERATIONS = {'reset_dpu': reset_dpu}
