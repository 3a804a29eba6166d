# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a guest carries is read as it was written, or refused as a whole."""

import json
import uuid

import testtools

from nova_accel.attach import carrying
from nova_accel import model

NODE, RUN, SERVER, OTHER = (str(uuid.UUID(int=n)) for n in range(1, 5))
CLAIM = model.Claim(
    uuid=str(uuid.uuid4()), instance_uuid=SERVER, consumer_uuid=SERVER,
    provider_uuid=str(uuid.uuid4()), resource_class='CUSTOM_ACCELERATOR_FPGA',
    group='1', device_address='0000:5e:00.0', region_index=0,
    handle=model.AttachHandle(
        model.HandleType.PCI, '0000:5e:00.1', False, ('0000:5e:00.2',),
        '0000:5e:00.0'),
    state=model.ClaimState.BOUND, project_id='demo', serial='S1',
    ids='8086 09c4', prepared=True, driver_memory='{"a": "\u00e4<"}',
    since='2026-11-22T02:17:43+00:00')
#: of any type that JSON has
VALUES = None, True, 7, 1.5, 'x', [], [1], {}, {'type': 'PCI'}


class CarriedTest(testtools.TestCase):

    def text(self, **changes):
        return json.loads(carrying.as_text(
            carrying.Carried(NODE, RUN, 3, (CLAIM,)))) | changes

    def assertRefused(self, found):
        self.assertRaises(carrying.Refused, carrying.parse, json.dumps(found),
                          SERVER)

    def test_as_written(self):
        found = carrying.parse(json.dumps(self.text()), SERVER)
        self.assertEqual(carrying.Carried(NODE, RUN, 3, (CLAIM,)), found)
        claim, = found.claims
        # what does not count where claims are compared
        self.assertEqual((CLAIM.since, CLAIM.handle.managed, (
            CLAIM.handle.addresses)), (claim.since, claim.handle.managed,
                                       claim.handle.addresses))

    def test_another_server(self):
        self.assertRaises(carrying.Refused, carrying.parse,
                          json.dumps(self.text()), OTHER)

    def test_other_values(self):
        """Each field of another type is refused, wherever it is."""
        for name in self.text():
            for value in VALUES:
                if type(value) is not type(self.text()[name]) or not value:
                    self.assertRefused(self.text(**{name: value}))
        claim = self.text()['claims'][0]
        for name, before in claim.items():
            for value in VALUES:
                if type(value) is type(before) or (
                        value is None and name in carrying._OPTIONAL
                        or name == 'region_index' and value in (None, 7)
                        or name in carrying._OPTIONAL and value == 'x'):
                    continue
                self.assertRefused(self.text(
                    claims=[claim | {name: value}]))
        for name, before in claim['handle'].items():
            for value in VALUES:
                if type(value) is not type(before) and (
                        name, value) != ('parent', None):
                    self.assertRefused(self.text(claims=[
                        claim | {'handle': claim['handle'] | {name: value}}]))

    def test_other_fields(self):
        claim = self.text()['claims'][0]
        for name in claim:
            self.assertRefused(self.text(claims=[
                {key: value for key, value in claim.items() if key != name}]))
        self.assertRefused(self.text(claims=[claim | {'new': 1}]))
        self.assertRefused(self.text(new=1))

    def test_one_claim_twice(self):
        claim = self.text()['claims'][0]
        self.assertRefused(self.text(claims=[claim, claim]))
        self.assertRefused(self.text(claims=[
            claim, claim | {'uuid': OTHER}]))

    def test_not_json(self):
        for text in ('{', 'null', '[]', '"x"', '[' * 100000):
            self.assertRaises(carrying.Refused, carrying.parse, text, SERVER)
