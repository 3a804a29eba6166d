# Licensed under the Apache License, Version 2.0. See LICENSE.

import json
import os
import tracemalloc

import fixtures
from hypothesis import assume
from hypothesis import example
from hypothesis import given
from hypothesis import strategies as st
import testtools

from nova_accel import bitstream
from nova_accel.bitstream import gbs
from nova_accel import exception
from tests.unit.bitstreams import HEX, INTERFACE, make, manifest, NLB0

LEGACY = (bytes.fromhex('80861f1d')
          + bytes.fromhex(HEX[INTERFACE])[::-1] + b'\x5a' * 10)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (st.lists(inner, max_size=3)
                   | st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8)


class GbsTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'f.gbs')

    def parse(self, data, name='image 4711'):
        with open(self.path, 'wb') as file:
            file.write(data)
        return gbs.parse(self.path, name)

    def refused(self, data):
        """The error's text, which always names the image and ends well."""
        text = str(self.assertRaises(
            exception.BitstreamError, self.parse, data))
        self.assertStartsWith(text, 'image 4711 ')
        self.assertEndsWith(text, '.')
        self.assertTrue(text.isprintable(), text)
        return text

    def assertStartsWith(self, text, prefix):
        self.assertThat(text, testtools.matchers.StartsWith(prefix))

    def assertEndsWith(self, text, suffix):
        self.assertThat(text, testtools.matchers.EndsWith(suffix))

    def test_what_the_packager_writes(self):
        data = make()
        found = self.parse(data)
        self.assertEqual(HEX[INTERFACE], found.region_type_uuid)
        self.assertEqual(HEX[NLB0], found.function_uuid)
        self.assertEqual(self.path, found.path)
        self.assertEqual(64, found.payload_size)
        self.assertEqual(b'\x5a' * 64, data[found.payload_offset:])
        self.assertEqual(len(data) - 64, found.payload_offset)

    def test_upper_case_uuids(self):
        found = self.parse(make(manifest(interface_uuid=INTERFACE.upper())))
        self.assertEqual(HEX[INTERFACE], found.region_type_uuid)

    def test_alias_versions(self):
        for version in (1, 640, 650):
            found = self.parse(make(manifest(version=version)))
            self.assertEqual(HEX[NLB0], found.function_uuid)

    def test_unknown_versions(self):
        for version in (2, 0, '1', [1], {}):
            self.assertIn('version', self.refused(
                make(manifest(version=version))))

    def test_legacy_form(self):
        found = self.parse(LEGACY)
        self.assertEqual(HEX[INTERFACE], found.region_type_uuid)
        self.assertIsNone(found.function_uuid)
        self.assertEqual((20, 10), (found.payload_offset, found.payload_size))

    def test_something_else(self):
        text = self.refused(b'\x7fELF' + bytes(100))
        self.assertIn('at offset 0 ', text)
        self.assertIn('7f454c46', text)

    def test_interface_missing(self):
        self.assertIn('lacks afu-image.interface-uuid', self.refused(
            make(manifest(interface_uuid=None))))

    def test_number_of_clusters(self):
        cluster = {'name': 'a', 'accelerator-type-uuid': NLB0}
        for clusters in ([], [cluster] * 2):
            self.assertIn(
                f'{len(clusters)} accelerator-clusters, and a region takes '
                f'exactly one',
                self.refused(make(manifest(accelerator_clusters=clusters))))

    def test_wrong_values(self):
        for metadata, part in (
                ([], 'lacks version'),
                ({'version': 1, 'afu-image': 7}, 'wrong afu-image'),
                (manifest(accelerator_clusters='x'), 'has a wrong'),
                (manifest(accelerator_clusters=['x']), 'clusters[0].acc'),
                (manifest(interface_uuid=17), 'has a wrong'),
                (manifest(interface_uuid='\ud800' * 500), 'not a UUID'),
                (manifest(interface_uuid=INTERFACE[:-1]), INTERFACE[:-1])):
            self.assertIn(part, self.refused(make(metadata)))

    def test_length_of_the_metadata(self):
        for length, part in ((0, 'is 0 and has to be 1 to 4095'),
                             (4096, 'is 4096 and'),
                             (2 ** 32 - 1, 'is 4294967295 and'),
                             (2000, 'ends within the metadata of 2000')):
            self.assertIn(part, self.refused(make(length=length)))

    def test_longest_metadata(self):
        metadata = json.dumps(manifest()).encode().ljust(4095)
        found = self.parse(make(metadata, payload=b'p'))
        self.assertEqual((4115, 1), (found.payload_offset, found.payload_size))

    def test_offset_of_bad_json(self):
        good = b'{"\xc3\xa9": '
        text = self.refused(make(good + b'!}'))
        self.assertIn(f'at offset {20 + len(good)} ', text)
        text = self.refused(make(good + b'\xff}'))
        self.assertIn(f'at offset {20 + len(good)} ', text)
        self.assertIn('UTF-8', text)

    def test_json_that_breaks_parsers(self):
        for metadata in (b'[' * 4095, b'{"version": ' + b'9' * 4000 + b'}',
                         b'{"version": NaN}', b'{"version": 1e999}', b'\0'):
            self.refused(make(metadata))

    def test_empty_payload(self):
        data = make(payload=b'')
        self.assertIn(f'at offset {len(data)} the file ends before the payload',
                      self.refused(data))
        self.assertIn('at offset 20 ', self.refused(LEGACY[:20]))

    def test_truncated_anywhere(self):
        data = make(payload=b'p')
        for length in range(len(data)):
            self.assertIn(f'at offset {length} ', self.refused(data[:length]))
        for length in range(21):
            self.refused(LEGACY[:length])

    def test_file_missing(self):
        error = self.assertRaises(
            exception.BitstreamError, gbs.parse, '/nowhere/f', 'image 4711')
        self.assertStartsWith(
            str(error), 'image 4711 cannot be read as a GBS file (No such ')
        error = self.assertRaises(
            exception.BitstreamError, gbs.parse, '/nowhere/f')
        self.assertStartsWith(str(error), '/nowhere/f ')

    def test_payload_is_not_read(self):
        with open(self.path, 'wb') as file:
            file.write(make())
            file.truncate(4 << 30)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        found = gbs.parse(self.path)
        self.assertEqual(4 << 30, found.payload_offset + found.payload_size)
        self.assertLess(tracemalloc.get_traced_memory()[1], 256 << 10)

    @given(st.binary(max_size=6000))
    @example(b'')
    def test_any_bytes(self, data):
        assume(not data.startswith(bitstream.XCLBIN))
        self.refused(data)

    @given(st.binary(max_size=5000))
    def test_any_metadata(self, data):
        self.refused(make(data))

    @given(JSON, JSON, JSON)
    def test_any_json(self, version, interface, clusters):
        try:
            self.parse(make({'version': version, 'afu-image': {
                'interface-uuid': interface,
                'accelerator-clusters': clusters}}))
        except exception.BitstreamError as e:
            self.assertTrue(str(e).isprintable())
        else:
            self.fail('made-up metadata passed')

    @given(st.integers(0, 600), st.binary(min_size=1, max_size=4))
    def test_any_damage(self, offset, damage):
        """Damage is refused or leaves UUIDs and bounds that make sense."""
        data = make()
        data = data[:offset] + damage + data[offset + len(damage):]
        try:
            found = self.parse(data)
        except exception.BitstreamError:
            return
        self.assertEqual(
            len(data), found.payload_offset + found.payload_size)
        self.assertEqual(32, len(bytes.fromhex(found.region_type_uuid)) * 2)

    @given(st.uuids(), st.uuids(), st.binary(min_size=1, max_size=100))
    def test_round_trip(self, interface, function, payload):
        data = make(manifest(
            interface_uuid=str(interface), accelerator_clusters=[
                {'accelerator-type-uuid': str(function)}]), payload)
        found = self.parse(data)
        self.assertEqual((interface.hex, function.hex),
                         (found.region_type_uuid, found.function_uuid))
        self.assertEqual(payload, data[found.payload_offset:])
