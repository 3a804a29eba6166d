# Licensed under the Apache License, Version 2.0. See LICENSE.
"""MariaDB, and what the databases hold before the first server exists.

The latter is made once, and kept in /seed.
"""

import concurrent.futures
import pathlib
import shutil

from tests import lab
from tests.lab import build
from tests.lab import processes
from tests.lab.processes import RUN

CONF = lab.LAB / 'conf'
BIN = pathlib.Path('/opt/openstack/bin')
SEED = pathlib.Path('/seed')
DATABASES = ('keystone', 'glance', 'placement', 'nova_api', 'nova',
             'nova_cell0')
SERVICES = (('image', 'glance', 'http://controller:9292'),
            ('placement', 'placement', 'http://controller:8778'),
            ('network', 'neutron', 'http://controller:9696'),
            ('compute', 'nova', 'http://controller:8774/v2.1'))
CONTROLLER = ('--config-file', CONF / 'nova.conf',
              '--config-file', CONF / 'nova-controller.conf')


def sql(*statements):
    import pymysql
    connection = pymysql.connect(unix_socket='/lab/mysql.sock', user='root')
    with connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def start():
    # everything is thrown away in the end, so nothing is flushed to the disk
    processes.start(
        'mariadb', 'mariadbd', '--no-defaults', '--user=root',
        f'--datadir={RUN}/mysql', '--socket=/lab/mysql.sock',
        '--skip-networking', '--skip-grant-tables', '--skip-log-bin',
        '--max-connections=500', '--innodb-buffer-pool-size=128M',
        '--innodb-flush-log-at-trx-commit=0', '--innodb-flush-method=nosync',
        '--innodb-doublewrite=0', '--performance-schema=off',
        # on since MariaDB 11.6.2: keystone answers 500 where two requests
        # note the log-in of a user at once, and a nova service ends with it
        '--innodb-snapshot-isolation=off')

    def ready():
        try:
            sql('SELECT 1')
            return True
        except Exception:
            return False
    processes.wait('mariadb', ready)


def start_with_content(more=None, ingredients=()):
    """Start MariaDB with its content from /seed, or make that first.

    :param more: makes further databases of the content.
    :param ingredients: files that it reads.
    :returns: whether the content was there.
    """
    digest = build.digest(
        pathlib.Path(__file__), *build.CONSTRAINTS, *ingredients, *(
            CONF / f'{name}.conf' for name in (
                'keystone', 'glance-api', 'placement', 'nova',
                'nova-controller')))
    there = build.complete(SEED, digest)
    if there:
        for name in ('mysql', 'keys'):
            shutil.copytree(SEED / name, RUN / name)
    else:
        seed(digest, more)
    start()
    return there


def keystone():
    processes.serve('keystone', 'keystone.wsgi.api:application', 5000)
    processes.wait('keystone', lambda: processes.answers(5000))


def seed(digest, more=None):
    """Schemas, the administrator and the catalog."""
    processes.call('schema', 'mariadb-install-db', '--no-defaults',
                   '--user=root', f'--datadir={RUN}/mysql',
                   '--skip-test-db', '--auth-root-authentication-method=socket')
    start()
    sql(*(f'CREATE DATABASE {name}' for name in DATABASES))
    manage = (BIN / 'keystone-manage', '--config-file',
              CONF / 'keystone.conf')
    nova = (BIN / 'nova-manage', *CONTROLLER)
    owner = ('--keystone-user', 'root', '--keystone-group', 'root')
    url = 'http://controller:5000/v3'
    cell0 = 'mysql+pymysql://root@/nova_cell0?unix_socket=/lab/mysql.sock'
    for name in ('fernet', 'receipts', 'credential'):
        (RUN / 'keys' / name).mkdir(parents=True, mode=0o700)

    def others():
        processes.call('schema-glance', BIN / 'glance-manage', '--config-file',
                       CONF / 'glance-api.conf', 'db_sync')
        processes.call('schema-placement', BIN / 'placement-manage',
                       '--config-file', CONF / 'placement.conf', 'db', 'sync')
        for command in (
                ('api_db', 'sync'),
                ('cell_v2', 'map_cell0', '--database_connection', cell0),
                ('db', 'sync'),
                ('cell_v2', 'create_cell', '--name', 'cell1')):
            processes.call('schema-nova', *nova, *command)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        rest = pool.submit(others)
        for command in (
                ('db_sync',), ('fernet_setup', *owner),
                ('credential_setup', *owner),
                ('bootstrap', '--bootstrap-password', 'secret',
                 '--bootstrap-region-id', 'RegionOne', '--bootstrap-admin-url',
                 url, '--bootstrap-internal-url', url,
                 '--bootstrap-public-url', url)):
            processes.call('schema-keystone', *manage, *command)
        keystone()
        catalog()
        rest.result()
        if more:
            more()
    processes.stop('keystone')
    processes.stop('mariadb')
    # first what says that the rest is complete
    (SEED / 'complete').unlink(missing_ok=True)
    for path in SEED.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ('mysql', 'keys'):
        shutil.copytree(RUN / name, SEED / name)
    (SEED / 'complete').write_text(digest)


def catalog(services=SERVICES):
    import openstack
    cloud = openstack.connect()
    for kind, name, url in services:
        service = cloud.identity.create_service(type=kind, name=name)
        for interface in ('public', 'internal', 'admin'):
            cloud.identity.create_endpoint(
                service_id=service.id, interface=interface, url=url,
                region_id='RegionOne')
