# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One broken host for each reason, as Placement describes its providers."""


from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel import naming
from nova_accel.planning import reasons
from nova_accel import request
from nova_accel.scheduler import candidates

GPU = 'CUSTOM_ACCELERATOR_GPU'
FPGA = 'CUSTOM_ACCELERATOR_FPGA'
DDR = 'CUSTOM_ACCELERATOR_MEMORY_DDR'


def provider(name='card', traits=(), held=None, **inventories):
    """:param held: consumer -> amount of each class.
    :param inventories: class -> (total, reserved), or more fields.
    """
    return reasons.Provider(
        name, name, 'root',
        {rc: {'total': 1, 'reserved': 0, 'allocation_ratio': 1.0,
              'min_unit': 1, 'max_unit': 2147483647, 'step_size': 1, **fields}
         for rc, fields in inventories.items()},
        frozenset(traits),
        {consumer: dict.fromkeys(inventories, amount)
         for consumer, amount in (held or {}).items()})


def who(consumer):
    return f'server {consumer}'


class ReasonsTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        config = config_fixture.Config(conf.CONF)
        config.setUp()
        self.addCleanup(config.cleanUp)


class OfProviderTest(ReasonsTestCase):

    def reason(self, there, required=(), forbidden=(), **resources):
        return reasons.of_provider(
            reasons.Need('1', resources or {GPU: 1}, frozenset(required),
                         frozenset(forbidden)), there, who)

    def test_free(self):
        self.assertIsNone(self.reason(provider(
            traits=['CUSTOM_A'], **{GPU: {'total': 8}}), ['CUSTOM_A'],
            ['CUSTOM_B'], **{GPU: 8}))

    def test_reasons(self):
        pool = {GPU: {'total': 8}}
        for expected, there, asked in (
                ('lacks the trait CUSTOM_A, CUSTOM_C',
                 provider(traits=['CUSTOM_B'], **pool),
                 {'required': ['CUSTOM_C', 'CUSTOM_A', 'CUSTOM_B']}),
                ('has the trait CUSTOM_B, which the flavor forbids',
                 provider(traits=['CUSTOM_B'], **pool),
                 {'forbidden': ['CUSTOM_B']}),
                (f'9 {GPU} asked, and it has 8 in all',
                 provider(**pool), {GPU: 9}),
                (f'2 {GPU} asked, and it gives 4 at a time, which are a set '
                 f'([accel] device_sets)',
                 provider(traits=[naming.SET], **{GPU: {
                     'total': 4, 'min_unit': 4, 'step_size': 4}}), {GPU: 2}),
                ('is fenced by nova_accel: nova-accel discover and nova-accel '
                 'claims on that host say why',
                 provider(traits=[naming.FENCED],
                          **{GPU: {'total': 8, 'reserved': 8}}), {}),
                (f'all of it (8 {GPU}) is reserved in Placement',
                 provider(**{GPU: {'total': 8, 'reserved': 8}}), {}),
                ('is held by server a', provider(held={'a': 1}, **{GPU: {}}),
                 {}),
                (f'8 {GPU} asked, 7 free of 8 (1 held by server a)',
                 provider(held={'a': 1}, **pool), {GPU: 8}),
                (f'3 {GPU} asked, 2 free of 8 (2 reserved, 4 held by server '
                 f'a, server b, server c and 1 more)',
                 provider(held=dict.fromkeys('dcba', 1), **{
                     GPU: {'total': 8, 'reserved': 2}}), {GPU: 3}),
                # more is allocated than there is now
                (f'1 {GPU} asked, 0 free of 2 (1 reserved, 2 held by server '
                 f'a)',
                 provider(held={'a': 2}, **{
                     GPU: {'total': 2, 'reserved': 1}}), {}),
                (f'9000 {DDR} asked, and it has 8192 in all',
                 provider(**{FPGA: {}, DDR: {'total': 8192}}),
                 {FPGA: 1, DDR: 9000})):
            with self.subTest(expected):
                self.assertEqual(expected, self.reason(there, **asked))

    def test_what_stays_comes_first(self):
        there = provider(
            traits=[naming.FENCED], held={'a': 1}, **{FPGA: {}})
        self.assertIn('lacks the trait CUSTOM_FPGA_XILINX', self.reason(
            there, ['CUSTOM_FPGA_XILINX', naming.PROGRAMMABLE], **{FPGA: 1}))
        self.assertIn('fenced', self.reason(
            there, [naming.PROGRAMMABLE], **{FPGA: 1}))
        # a region in use is not programmable because it is in use
        self.assertEqual('is held by server a', self.reason(
            provider(held={'a': 1}, **{FPGA: {}}), [naming.PROGRAMMABLE],
            **{FPGA: 1}))
        self.assertEqual(
            f'lacks the trait {naming.PROGRAMMABLE} now',
            self.reason(provider(**{FPGA: {}}), [naming.PROGRAMMABLE],
                        **{FPGA: 1}))


class OfHostTest(ReasonsTestCase):

    def why(self, specs, *providers, policy=None):
        return reasons.of_host(request.groups(specs), providers, who, policy)

    def test_class_that_is_not_there(self):
        self.assertEqual(
            [f'no provider of the host has {GPU} (of accelerators it has '
             f'{FPGA})'],
            self.why({f'resources1:{GPU}': '1'}, provider(**{FPGA: {}})))

    def test_fenced_with_nothing_to_give(self):
        """A card whose functions no guest may have is not a card missing."""
        self.assertEqual(
            [f'no provider of the host has {GPU} (of accelerators it has '
             f'none); fenced, with nothing to give: host_accel_x, see '
             f'nova-accel discover and nova-accel claims on the host'],
            self.why({f'resources1:{GPU}': '1'}, provider('root'),
                     provider('host_accel_x', [naming.FENCED])))

    def test_of_the_host_itself(self):
        root = provider('root', ['CUSTOM_X'], {'a': 5}, VCPU={'total': 8})
        self.assertEqual(
            ['4 VCPU asked, 3 free'],
            self.why({'resources:VCPU': '4', f'resources1:{GPU}': '1'}, root,
                     provider(**{GPU: {}})))
        self.assertEqual(
            ['no provider of the host has the trait CUSTOM_Y'],
            self.why({'resources:VCPU': '1', 'trait:CUSTOM_X': 'required',
                      'trait:CUSTOM_Y': 'required'}, root))

    def test_not_for_all_groups(self):
        """Each group fits, and they want the same device."""
        specs = {f'resources1:{FPGA}': '1', f'resources2:{FPGA}': '1',
                 f'resources3:{FPGA}': '1'}
        three = [provider(name, **{FPGA: {}}) for name in 'abc']
        self.assertEqual([], self.why(specs, *three))
        self.assertIn('not enough for all 3 together',
                      self.why(specs, *three[:2])[0])

    def test_isolated_groups(self):
        specs = {f'resources1:{GPU}': '1', f'resources2:{GPU}': '1'}
        pool = provider(**{GPU: {'total': 8}})
        self.assertEqual([], self.why(specs, pool))
        self.assertIn('group_policy=isolate requires another provider',
                      self.why(specs, pool, policy='isolate')[0])

    def test_what_providers_say_is_not_said_twice(self):
        self.assertEqual([], self.why(
            {f'resources1:{GPU}': '1'}, provider(held={'a': 1}, **{GPU: {}})))


class GroupsTest(ReasonsTestCase):
    """The groups of a flavor as Placement is asked for them."""

    def test_url(self):
        groups = request.groups({
            'resources:VCPU': '2', 'resources:DISK_GB': '0',
            'trait:CUSTOM_HOST': 'required',
            f'resources_ACCEL0:{FPGA}': '1',
            'trait_ACCEL0:CUSTOM_A': 'required',
            'trait_ACCEL0:CUSTOM_B': 'forbidden',
            'accel_ACCEL0:function_name': 'nlb',
            'resources1:CUSTOM_NIC': '3', 'hw:numa_nodes': '2'})
        self.assertEqual(
            '/allocation_candidates?resources=VCPU:2&required=CUSTOM_HOST'
            f'&resources_ACCEL0={FPGA}:1&required_ACCEL0=CUSTOM_A,!CUSTOM_B'
            '&resources1=CUSTOM_NIC:3&group_policy=none'
            '&root_required=!COMPUTE_STATUS_DISABLED&in_tree=r'
            '&in_tree_ACCEL0=r&in_tree1=r&limit=7',
            candidates.url(groups, 7, root_forbidden=[
                'COMPUTE_STATUS_DISABLED'], in_tree='r'))

    def test_early_spellings(self):
        self.assertEqual(
            {'': request.Group({FPGA: 1})},
            request.groups({f'resources:{FPGA}': 1,
                            'function_name:nlb': 'required'}))
