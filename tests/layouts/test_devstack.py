# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The DevStack plugin with DevStack's own functions.

DEVSTACK is a clone of openstack/devstack; without it the tests are skipped.
Nova and nova_accel are installed as stack.sh does: by setup_develop, with the
real pip and without an index, Nova first.
"""

import json
import os
import re
import shutil
import textwrap

from tests.layouts import base
from tests.unit import pages

#: a host with the board of the page
BOARD = '''
others:
  - {address: '0000:05:00.0', vendor: '10ee', device: '9038', class: '0x120000'}
'''
SCRIPT = textwrap.dedent(r'''
    set -eo pipefail
    TOP_DIR=$DEVSTACK
    FILES=$DEVSTACK/files
    source $DEVSTACK/functions
    # of lib/nova and stack.sh
    NOVA_CONF_DIR=$DEST/etc
    NOVA_CONF=$NOVA_CONF_DIR/nova.conf
    NOVA_STATE_PATH=$DEST/state
    NOVA_FILTERS=ComputeFilter,SameHostFilter
    ENABLED_SERVICES=n-cpu,n-sch,n-api
    mkdir -p $NOVA_CONF_DIR/rootwrap.d $NOVA_STATE_PATH
    touch $NOVA_CONF
    define_plugin() { :; }
    enable_plugin() { :; }
    echo_summary() { echo "summary $*"; }
    extract_localrc_section $DEST/local.conf $DEST/localrc $DEST/localrc.auto
    source $DEST/localrc.auto
    source $DEST/nova_accel/devstack/settings
    setup_develop $DEST/nova
    for phase in pre-install install post-config extra; do
        source $DEST/nova_accel/devstack/plugin.sh stack $phase
        [ $phase != post-config ] || \
            merge_config_group $DEST/local.conf post-config
    done
''')


#: what stack.sh does with a plugin that local.conf enables
FETCH = textwrap.dedent(r'''
    set -e
    TOP_DIR=$DEVSTACK
    FILES=$DEVSTACK/files
    declare -A GITREPO GITDIR GITBRANCH
    cd $DEVSTACK
    source $DEVSTACK/functions
    ERROR_ON_CLONE=False RECLONE=False
    eval "$LINE"
    fetch_plugins
    load_plugin_settings
    echo "drivers $NOVA_ACCEL_DRIVERS"
''')


class DevStackTest(base.LayoutTestCase):

    def setUp(self):
        super().setUp()
        self.devstack = os.environ.get('DEVSTACK', '')
        if not os.path.exists(f'{self.devstack}/functions-common'):
            self.skipTest('DEVSTACK does not name a clone of DevStack')
        (self.there.directory / 'bin').mkdir()
        # install(1) gives a file to root
        self.script(self.there.directory / 'bin' / 'sudo', '#!/bin/sh\n'
                    'while [ "${1#-}" != "$1" ]; do shift; done\n'
                    'exec env "$@"\n')

    def path(self):
        return (f'{self.there.directory}/bin:{self.there.prefix}/bin:'
                f'{os.environ["PATH"]}')

    def test_line_of_the_page(self):
        """DevStack takes the branch master where the line names none."""
        text = (base.ROOT / 'docs/source/board.rst').read_text()
        line, = re.findall('enable_plugin nova_accel /.*', text)
        clone = self.there.directory / 'clone'
        path, branch = line.split()[2:]
        base.source(clone)
        identity = ('-c', 'user.name=a', '-c', 'user.email=a@example.org')
        for command in (('init', '-q', '-b', branch), ('add', '.'),
                        ('commit', '-q', '-m', 'as committed')):
            self.there.check_call('git', '-C', clone, *identity, *command)
        said = self.there.check_call(
            'bash', '-c', FETCH, DEVSTACK=self.devstack, PATH=self.path(),
            DEST=str(self.there.directory / 'stack'),
            LINE=line.replace(path, str(clone)), OFFLINE='False',
            # the machine's own stays as it is
            GIT_CONFIG_SYSTEM=str(self.there.directory / 'gitconfig'))
        self.assertIn('drivers dfl', said)

    def test_stack(self):
        if not shutil.which('gawk'):
            # mawk cannot read merge_config_file of DevStack, which installs it
            self.skipTest('gawk is not installed')
        dest = self.there.directory
        self.there.nova_checkout()
        base.source(dest / 'nova_accel')
        # of the page on one PC and one board, with a board like its own
        block, = [block for block in pages.Page(
                      base.ROOT / 'docs/source/board.rst').blocks
                  if 'local|localrc' in block]
        (dest / 'local.conf').write_text(block)
        (dest / 'host.yaml').write_text(BOARD)
        requirements = dest / 'requirements'
        (requirements / '.venv' / 'bin').mkdir(parents=True)
        (requirements / 'upper-constraints.txt').touch()
        # of the package openstack_requirements
        self.script(requirements / '.venv' / 'bin' / 'edit-constraints',
                    '#!/bin/sh\nexit 0\n')
        self.script(self.there.prefix / 'bin' / 'pip',
                    f'#!/bin/sh\nexec {self.there.python} -m pip "$@"\n')
        said = self.there.check_call(
            'bash', '-c', SCRIPT, DEVSTACK=self.devstack, DEST=str(dest),
            PATH=self.path(),
            GLOBAL_VENV='True', DEVSTACK_VENV=str(self.there.prefix),
            REQUIREMENTS_DIR=str(requirements), STACK_USER='root',
            PYTHON3_VERSION='3', PIP_NO_INDEX='1', PIP_NO_BUILD_ISOLATION='0',
            os_PACKAGE='deb', os_VENDOR='Debian', OFFLINE='False')
        self.assertIn('summary Configuring nova_accel', said)
        with open(dest / 'etc' / 'nova.conf') as file:
            plugin = file.read()
        self.assertIn('compute_driver = accel.AccelLibvirtDriver', plugin)
        self.assertIn('enabled_filters = ComputeFilter,SameHostFilter,'
                      'AcceleratorFilter', plugin)
        shown = json.loads(self.there.check_call(
            self.there.prefix / 'bin' / 'nova-accel', 'discover',
            '--config-file', dest / 'etc' / 'nova.conf', '--simulated-host',
            dest / 'host.yaml', '-f', 'json'))
        self.assertEqual(
            [('AI XILINX BOARD', 'ok')],
            [(row['What'], row['Health']) for row in shown])
        # what stack.sh adds of its own
        self.there.config.write_text(plugin.replace(
            '[DEFAULT]\n', '[DEFAULT]\nhost = compute1\n'
            f'transport_url = fake:/\nstate_path = {dest}/state\n', 1))
        self.assertStarts()
        self.assertTrue(shutil.which('nova-compute',
                                     path=str(self.there.prefix / 'bin')))

    @staticmethod
    def script(path, text):
        path.write_text(text)
        path.chmod(0o755)
