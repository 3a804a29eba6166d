# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A test that hangs fails, says where, and does not disturb the next one."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import fixtures
import testtools

TESTS = textwrap.dedent('''
    import os
    import subprocess
    import sys
    import threading
    import time

    if os.environ.get('GREEN'):
        import eventlet
        eventlet.monkey_patch()

    import testtools

    from nova_accel.host import limited
    from tests import limits

    limits.apply()
    limits.LAST = 2
    limits.ENDS = 0.3


    class HangsTest(testtools.TestCase):
        LIMIT = 1

        def test_1_waits(self):
            self.addCleanup(print, 'cleaned up')
            lock = threading.Lock()
            lock.acquire()
            while True:
                try:
                    lock.acquire()
                except Exception:
                    pass

        def test_2_the_next_one(self):
            print('the next one')

        def test_3_leaves_a_process(self):
            subprocess.Popen(['sleep', '1'])

        def test_3_leaves_a_thread(self):
            limited.start(self.goes_on)

        @staticmethod
        def goes_on():
            time.sleep(1)

        def test_3_leaves_its_own_thread(self):
            threading.Thread(target=self.goes_on, daemon=True).start()

        def test_4_another_one_again(self):
            time.sleep(0.5)

        def test_5_a_green_thread_that_never_waits(self):
            if not os.environ.get('GREEN'):
                self.skipTest('without green threads')

            def run():
                while True:
                    pass

            eventlet.spawn(run)
            while True:
                time.sleep(0.01)

        def test_6_the_next_one_after_it(self):
            time.sleep(0.5)

        def test_7_cannot_be_interrupted(self):
            while True:
                try:
                    time.sleep(1)
                except BaseException:
                    pass
''')


#: the process would wait for the thread
STAYS = textwrap.dedent('''
    import threading
    import time

    import testtools

    from tests import limits

    limits.apply()
    limits.LIMIT, limits.LAST, limits.ENDS = 1, 2, 0.3


    class StaysTest(testtools.TestCase):

        def test_leaves_a_thread_that_python_awaits(self):
            threading.Thread(target=time.sleep, args=[3600]).start()
''')


class LimitsTest(testtools.TestCase):

    def run_tests(self, green, tests=TESTS):
        directory = self.useFixture(fixtures.TempDir())
        with open(directory.join('test_hangs.py'), 'w') as file:
            file.write(tests)
        done = subprocess.run(
            [sys.executable, '-W', 'ignore', '-m', 'testtools.run',
             'test_hangs'], timeout=120, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env={**os.environ, 'GREEN': green, 'PYTHONPATH': os.pathsep.join(
                [directory.path, *sys.path])})
        self.addDetail('said', testtools.content.text_content(done.stdout))
        return done

    def check(self, done, marks):
        # the last resort
        self.assertEqual(1, done.returncode)
        self.assertIn('Timeout (0:00:03)!', done.stdout)
        # those before, one mark each
        self.assertIn('cleaned up', done.stdout)
        self.assertEqual(marks, ''.join(
            c for c in done.stdout.split('Timeout (')[0].split(
                'Tests running...')[1] if c in '.FE'))

    def test_every_test_is_limited(self):
        """One of unittest itself would not be."""
        tests = pathlib.Path(__file__).parents[1]
        self.assertEqual([], [
            path.name for part in ('unit', 'host', 'functional', 'layouts')
            for path in sorted((tests / part).rglob('*.py'))
            if re.search(r'^class .*\bunittest\.', path.read_text(), re.M)])

    def test_native(self):
        done = self.run_tests('')
        self.check(done, 'F.FFF..')
        self.assertIn('in test_7_cannot_be_interrupted', done.stdout)

    def test_eventlet(self):
        self.check(self.run_tests('yes'), 'F.FFF.F.')

    def test_end_of_the_process(self):
        done = self.run_tests('', STAYS)
        self.assertEqual(1, done.returncode)
        self.assertIn('FAILED (failures=1)\nTimeout (0:00:03)!', done.stdout)
        self.assertIn('in _shutdown', done.stdout)
