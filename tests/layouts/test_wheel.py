# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Wheels beside each other, as operators install both.

It is the layout that each change has to pass, and with the oldest Nova.
"""

import textwrap
import zipfile

from tests.layouts import base

#: what nova-api loads, in a process of nova-scheduler
LOAD = textwrap.dedent('''
    from nova.scheduler import weights
    from nova.api.validation.extra_specs import validators
    from nova.compute import api
    import nova_accel
    weigher, = weights.HostWeightHandler().get_matching_classes(
        ['nova_accel.scheduler.weights.AcceleratorWeigher'])
    assert 'accel{group}:function_id' in validators.VALIDATORS
    assert api.API.create.__wrapped__
    print('LOADED', nova_accel.__file__, weigher.__name__)
''')


class WheelTest(base.LayoutTestCase):

    def test_wheel_beside_wheel(self):
        names = zipfile.ZipFile(base.wheel()).namelist()
        # a file among Nova's would be found beside some Novas only, and
        # `pip install --target --upgrade` would delete Nova for it
        self.assertEqual([], [name for name in names
                              if name.startswith(('nova/', 'tests'))])
        self.there.nova_wheel()
        self.there.accel_wheel()
        self.assertStarts()
        said = self.there.start_scheduler(LOAD)
        self.assertIn('STARTED ComputeFilter AcceleratorFilter', said)
        self.assertIn(f'LOADED {self.there.packages}/nova_accel/__init__.py '
                      'AcceleratorWeigher', said)
        self.there.accel_uninstall()
        self.assertNovaIsWhole()
        # a nova-scheduler that still names the filter does not start
        said = self.there.start_scheduler()
        self.assertIn("No module named 'nova_accel'", said)
        self.assertNotIn('STARTED', said)
