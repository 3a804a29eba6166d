# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What an operation decides to do for a server, by tables."""

import uuid

import ddt
import testtools

from nova_accel.attach import plan
from nova_accel import exception
from nova_accel import model
from nova_accel import request

FPGA, GPU = 'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_ACCELERATOR_GPU'
P1, P2, P3 = (str(uuid.UUID(int=n)) for n in (1, 2, 3))
SERVER = 'server'
#: a provider of Nova's own
NOVAS = str(uuid.UUID(int=9))


def asks(group='1', name=FPGA, amount=1, **more):
    return request.AcceleratorRequest(group, name, amount, **more)


def given(*allocations, traits=frozenset()):
    """(allocations of Placement, ours among them)"""
    ours = [request.Allocation(provider, resources, traits)
            for provider, resources in allocations if provider != NOVAS]
    return ({provider: {'resources': dict(resources)}
             for provider, resources in allocations}, ours)


def holds(provider=P1, group='1', name=FPGA, state=model.ClaimState.BOUND,
          at='0000:5e:00.0'):
    return model.Claim(
        uuid=str(uuid.uuid4()), instance_uuid=SERVER, consumer_uuid=SERVER,
        provider_uuid=provider, resource_class=name,
        group=group, device_address=at, region_index=0, state=state,
        handle=model.AttachHandle(model.HandleType.PCI, at))


def shown(steps):
    """A plan as the tables write it."""
    return ([(k.wanted.group, [c.provider_uuid for c in k.claims])
             for k in steps.keep],
            [(t.wanted.group, t.provider_uuid) for t in steps.take],
            [c.provider_uuid for c in steps.surplus])


NOTHING = ([], [], [])
ONE = (P1, {FPGA: 1})
#: what it is about -> asked, allocated, held, plug, start; an error is the
#: words that it has
CASES = {
    'a new server': (
        [asks()], [ONE], [], ([], [('1', P1)], []), ([], [('1', P1)], [])),
    'as it was': (
        [asks()], [ONE], [holds()],
        ([('1', [P1])], [], []), ([('1', [P1])], [], [])),
    'half done': (
        [asks()], [ONE], [holds(state=model.ClaimState.UNKNOWN)],
        ([('1', [P1])], [], []), ([('1', [P1])], [], [])),
    'nothing allocated': (
        [asks()], [], [], 'has no accelerators', 'none allocated to it'),
    'nothing allocated any more': (
        [asks()], [], [holds()], 'has no accelerators', 'none allocated to it'),
    'another device allocated': (
        [asks()], [(P2, {FPGA: 1})], [holds()],
        ([], [('1', P2)], [P1]), 'Placement has not allocated to it'),
    'one of two is missing': (
        [asks('1'), asks('2')], [ONE, (P2, {FPGA: 1})], [holds()],
        ([('1', [P1])], [('2', P2)], []), ([('1', [P1])], [('2', P2)], [])),
    'a surplus of a killed resize': (
        [asks()], [ONE, (P2, {FPGA: 1})], [holds(P2)],
        ([('1', [P2])], [], []), ([('1', [P2])], [], [])),
    'several of one provider': (
        [asks(amount=2)], [(P1, {FPGA: 2})],
        [holds(at='0000:5e:00.1'), holds(at='0000:5e:00.2')],
        ([('1', [P1, P1])], [], []), ([('1', [P1, P1])], [], [])),
    'a resize that failed left another allocation': (
        [asks()], [(P1, {GPU: 1})], [],
        'does not fit', ([], [('', P1)], [])),
    'and its devices are held': (
        [asks()], [(P1, {GPU: 1}), (P2, {GPU: 1})],
        [holds(P1, '', GPU), holds(P2, '', GPU, at='0000:af:00.0')],
        'does not fit', ([('', [P1]), ('', [P2])], [], [])),
    'a resize to fewer of a pool that failed': (
        [asks(amount=2)], [ONE], [holds()],
        'does not fit', ([('1', [P1])], [], [])),
    'and to fewer groups': (
        [asks('1'), asks('2')], [ONE], [holds(group='2')],
        'does not fit', ([('2', [P1])], [], [])),
    'and a claim is missing besides': (
        [asks(amount=3)], [(P1, {FPGA: 2})], [holds()],
        'does not fit', ([('1', [P1])], [('', P1)], [])),
    "a vGPU of Nova's own": (
        [asks(name='VGPU')], [(NOVAS, {'VGPU': 1})], [], NOTHING, NOTHING),
    "a vGPU of Nova's own that is not allocated": (
        [asks(name='VGPU')], [], [], 'has no accelerators',
        'none allocated to it'),
    "one of ours beside one of Nova's": (
        [asks(name='VGPU'), asks('2')], [(NOVAS, {'VGPU': 1}), ONE],
        [holds(group='2')],
        ([('2', [P1])], [], []), ([('2', [P1])], [], [])),
}


@ddt.ddt
class PlanTest(testtools.TestCase):

    def decide(self, decision, asked, allocated, held):
        return decision(SERVER, asked, *given(*allocated), held)

    def check(self, decision, expected, *case):
        if isinstance(expected, str):
            error = self.assertRaises(
                exception.DeviceUnavailable, self.decide, decision, *case)
            self.assertIn(expected, str(error))
            self.assertLess(len(str(error)), 255)
        else:
            self.assertEqual(expected, shown(self.decide(decision, *case)))

    @ddt.data(*CASES)
    def test_plug(self, name):
        asked, allocated, held, expected, _ = CASES[name]
        self.check(plan.to_plug, expected, asked, allocated, held)

    @ddt.data(*CASES)
    def test_start(self, name):
        asked, allocated, held, _, expected = CASES[name]
        self.check(plan.to_start, expected, asked, allocated, held)

    def test_start_never_releases(self):
        for asked, allocated, held, _, _ in CASES.values():
            try:
                steps = self.decide(plan.to_start, asked, allocated, held)
            except exception.DeviceUnavailable:
                continue
            self.assertEqual((), steps.surplus)
            self.assertEqual(
                {c.uuid for c in held},
                {c.uuid for k in steps.keep for c in k.claims})

    def test_complete(self):
        for complete, asked, held in (
                (True, [], []), (True, [asks()], [holds()]),
                (False, [asks()], []), (False, [asks(amount=2)], [holds()]),
                (False, [asks(), asks('2')], [holds()]),
                (False, [asks(name='VGPU')], []),
                # whose the other one is, only Placement knows
                *((False, [asks(name=name), asks('2')], [holds(group='2')])
                  for name in ('VGPU', 'PGPU')),
                (False, [asks(name='PGPU'), asks('2', 'PGPU')],
                 [holds(group='2', name='PGPU')]),
                *((False, [asks()], [holds(state=state)])
                  for state in model.ClaimState
                  if state is not model.ClaimState.BOUND)):
            self.assertIs(complete, plan.is_complete(asked, held))

    def test_after_a_move(self):
        """Once the migration has nothing allocated any more."""
        for allocated, old, current, back in (
                # the move failed, and not more is allocated than before
                ({P1: 1}, [P1], [], [P1]), ({P1: 1}, [P1, P1], [], [P1]),
                ({P2: 1}, [P1], [], []),
                # confirmed
                ({P2: 1}, [P1], [P2], []), ({P1: 2}, [P1], [P1, P1], []),
                # reverted
                ({P1: 1}, [P1], [P2], [P1]),
                ({P1: 1}, [P1], [P1, P1], [P1]),
                ({P1: 2}, [P1, P1], [P1], [P1, P1]),
                # neither: what its guest may have stays
                ({}, [P1], [P2], []), ({P1: 1}, [P1, P1], [P2], [])):
            allocations = {uuid: {'resources': {FPGA: amount}}
                           for uuid, amount in allocated.items()}
            self.assertEqual(back, [
                claim.provider_uuid for claim in plan.to_come_back(
                    allocations, [holds(uuid) for uuid in old],
                    [holds(uuid) for uuid in current], self.fail)])

    def test_to_come_back_of_a_pool(self):
        """From the same pool as many: Placement does not tell which."""
        old, current = [holds(P1)], [holds(P1)]
        for reverted, back in ((True, old), (False, [])):
            self.assertEqual(back, plan.to_come_back(
                {P1: {'resources': {FPGA: 1}}}, old, current,
                lambda: reverted))
