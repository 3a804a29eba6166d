# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which handles servers can get, by devices, claims and holds."""

import dataclasses
import uuid

import ddt
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.inventory import holds
from nova_accel.inventory import offers
from nova_accel import model
from nova_accel.store import values
from tests.unit.inventory_host import A, B, fpga, handle

FREE, HELD, RELEASING, WITHHELD = offers.State
BOUND, DELETING, WAITING = (model.ClaimState.BOUND, model.ClaimState.DELETING,
                            model.ClaimState.WAITING)
Kind = holds.Kind
VFS = [f'{A[:-1]}{n}' for n in (1, 2)]


def card(address=A, handles=VFS):
    return fpga(address, regions=0, handles=tuple(map(handle, handles)))


def claim(address, state=BOUND, index=None, device=A, instance='i', **more):
    return model.Claim(
        uuid=str(uuid.uuid4()), instance_uuid=instance, consumer_uuid='i',
        provider_uuid='p', resource_class='X', group='1',
        device_address=device, region_index=index, state=state,
        handle=handle(address), **more)


def hold(kind, **more):
    return holds.Hold(kind, A, 'because', **more)


def offered(*devices, claims=(), more=(), lost=(), sets=()):
    by_address = {device.address: device for device in devices}
    return offers.offers(by_address, claims, (
        *more, *offers.of_claims(by_address, claims, lost)), sets)


def shown(found):
    """Address of a handle -> its state and kinds."""
    return {one.handle.address: (one.state, *[h.kind for h in one.all_holds])
            for one in found.all()}


@ddt.ddt
class StateTest(testtools.TestCase):

    @ddt.data(
        # claim; further holds -> state, kinds, whether it counts, is fit
        (None, (), FREE, [], True, True),
        (None, [hold(Kind.SUSPECT)], FREE, [Kind.SUSPECT], True, True),
        (None, [hold(Kind.DISABLED)], WITHHELD, [Kind.DISABLED], False, False),
        (None, [hold(Kind.DISABLED, handle=handle(VFS[1]))], FREE, [], True,
         True),
        ({}, (), HELD, [], True, True),
        # what a server has counts, whatever its card is like
        ({}, [hold(Kind.GONE)], HELD, [Kind.GONE], True, False),
        ({'lost': True}, (), HELD, [Kind.UNALLOCATED], False, False),
        ({'state': DELETING}, (), RELEASING, [Kind.NOT_CLEANED], False, False),
        ({'state': DELETING, 'lost': True}, (), RELEASING,
         [Kind.NOT_CLEANED, Kind.UNALLOCATED], False, False),
        ({'state': WAITING}, (), WITHHELD, [Kind.WAITING], False, False))
    @ddt.unpack
    def test_handle(self, has, more, state, kinds, counts, is_fit):
        claims, lost = [], []
        if has is not None:
            has = dict(has)
            is_lost = has.pop('lost', False)
            claims = [claim(VFS[0], **has)]
            lost = [claims[0].uuid] if is_lost else []
        one, other = offered(card(), claims=claims, more=more,
                             lost=lost).of((A, None))
        self.assertEqual(
            (state, kinds, counts, is_fit),
            (one.state, [h.kind for h in one.all_holds], one.counts,
             one.is_fit))
        self.assertEqual(claims, [one.claim] if one.claim else [])
        self.assertIsNone(other.claim)

    @ddt.data(
        # error -> kind, whether the region counts
        ('', Kind.CLEANING, True), ('It is dirty.', Kind.NOT_CLEANED, False))
    @ddt.unpack
    def test_region_that_is_released(self, error, kind, counts):
        one, = offered(fpga(A), claims=[
            claim(VFS[0], DELETING, 0, error=error)]).of((A, 0))
        self.assertEqual(((RELEASING, kind), counts), (
            (one.state, *[h.kind for h in one.all_holds]), one.counts))
        self.assertEqual(not counts, one.is_used)

    def test_region_that_is_withheld(self):
        """Not the others of its card."""
        found = offered(fpga(A, regions=2),
                        more=[hold(Kind.UNUSABLE, region=1)])
        self.assertEqual([[handle(VFS[0])], [], False, True], [
            found.free((A, 0)), found.free((A, 1)),
            *[bool(found.withheld_by((A, n))) for n in (0, 1)]])

    def test_whole_card_beside_its_vfs(self):
        """The handle of the claim is not reported now."""
        found = offered(card(), claims=[claim(A)])
        self.assertEqual(
            {A: (HELD, Kind.OVERLAP), **dict.fromkeys(
                VFS, (WITHHELD, Kind.OVERLAP))}, shown(found))
        self.assertEqual([True, True, False], [
            one.is_shown for one in found.of((A, None))])

    def test_handle_of_two_devices(self):
        """The claim is of the second one, and counts once for each."""
        found = offered(card(), card(B), claims=[claim(VFS[0], device=B)])
        self.assertEqual(
            [(part, HELD, True) for part in ((A, None), (B, None))],
            [(one.part, one.state, one.is_shown) for one in found.all()
             if one.claim])

    def test_handle_at_another_device(self):
        """The claim counts there."""
        found = offered(card(), card(B, ()), claims=[claim(VFS[0], device=B)])
        self.assertEqual(([], [HELD, FREE]), (found.of((B, None)), [
            one.state for one in found.of((A, None))]))

    def test_claim_of_a_device_that_is_not_here(self):
        one, = offered(claims=[claim(B, device=B)]).all()
        self.assertEqual((HELD, None, (B, None)),
                         (one.state, one.device, one.part))

    @ddt.data(
        # members, claims -> those that are withheld by their set
        ([A, B], [], []), ([A, B, 'missing'], [], [A, B]),
        ([A, B], [A], [B]), ([A, B], [A, B], []))
    @ddt.unpack
    def test_set(self, members, claimed, withheld):
        found = offered(
            *(card(address, [address]) for address in (A, B)),
            claims=[claim(a, device=a) for a in claimed], sets=[members])
        self.assertEqual(withheld, [
            address for address, (_, *kinds) in sorted(shown(found).items())
            if Kind.INCOMPLETE_SET in kinds])

    @ddt.data(
        # groups, claims, sets -> those that are withheld by their group
        ([[A, B]], [], [], [A, B]), ([[A], [B]], [], [], []),
        ([[A, B]], [], [[A, B]], []), ([[A, B]], [A], [], [B]),
        # nothing can be done about what servers have
        ([[A, B]], [A, B], [], []),
        # a bridge
        ([[A, '0000:00:01.0']], [], [], []))
    @ddt.unpack
    def test_iommu_group(self, groups, claimed, sets, withheld):
        found = offered(
            *(dataclasses.replace(card(address, [address]), groups=tuple(
                tuple(group) for group in groups if address in group))
              for address in (A, B)),
            claims=[claim(a, device=a, instance=a) for a in claimed],
            sets=sets)
        self.assertEqual(withheld, [
            address for address, (_, *kinds) in sorted(shown(found).items())
            if Kind.IOMMU_GROUP in kinds])
        self.assertEqual(withheld, sorted(
            hold.device for hold in found.all_holds()))

    @ddt.data((('i', 'i'), []), (('i', 'j'), [A, B]))
    @ddt.unpack
    def test_rivals(self, servers, rivals):
        """One server may have all of a group, without a word about it."""
        devices = {address: dataclasses.replace(
            card(address, [address]), groups=((A, B),))
            for address in (A, B)}
        found = offered(*devices.values(), claims=[
            claim(address, device=address, instance=server)
            for address, server in zip((A, B), servers, strict=True)])
        self.assertEqual(rivals, [
            offer.handle.address
            for offer, _ in offers.rivals(found, devices, ())])

    def test_iommu_group_of_vfs(self):
        """Handles of one device, too."""
        device = dataclasses.replace(card(), groups=((A, *VFS),))
        self.assertEqual(dict.fromkeys(VFS, (WITHHELD, Kind.IOMMU_GROUP)),
                         shown(offered(device)))
        # one is withheld for another reason
        self.assertEqual(
            [handle(VFS[1])], offered(device, more=[hold(
                Kind.IN_USE, handle=handle(VFS[0]))]).free((A, None)))

    @ddt.data(
        # policy at the release, and now -> withheld
        ('none', 'clear', True), ('reset', 'clear', True),
        ('none', 'reset', True), ('reset', 'reset', False),
        ('none', 'none', False), ('none', 'operator', False))
    @ddt.unpack
    def test_unclean(self, had, now, withheld):
        self.useFixture(config_fixture.Config(conf.CONF)).config(
            handover=[now], group='accel')
        device = card()
        rows = [values.Unclean(VFS[0], A, '', device.ids, had)]
        found = list(offers.of_unclean([device], rows))
        self.assertEqual([handle(VFS[0])] * withheld,
                         [one.handle for one in found])

    def test_all_wait(self):
        """The oldest first; none where another one does not."""
        two, one = claims = [claim(a, WAITING) for a in reversed(VFS)]
        found = offered(card(), claims=claims)
        self.assertEqual((two, one), found.all_wait(found.of((A, None))))
        found = offered(card(), claims=[one])
        self.assertEqual((), found.all_wait(found.of((A, None))))
