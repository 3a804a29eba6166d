# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Makes what the lab runs in: a chroot, and the virtual machine's disk.

    tree/    Debian with QEMU, MariaDB, RabbitMQ and, in /opt/openstack,
             keystone, glance, placement and nova
    image/   the machine's root file system, kernel and initrd, and probe.elf,
             the kernel of the guests

Both are made in work/ and moved to their place when complete, and made again
when this file or what it installs has changed. Packages come from the mirrors
and the index for which the host is configured.
"""

import concurrent.futures
import configparser
import contextlib
import fcntl
import hashlib
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import time

from tests import lab

SUITE = 'trixie'
#: on the host; the rest is in the chroot
HOST_PACKAGES = ['mmdebstrap', 'debian-archive-keyring']
TREE_PACKAGES = [
    # from backports: the first with a client for emulated PCI functions
    # (vfio-user-pci) is 10.1
    'qemu-system-x86', 'qemu-utils',
    'mariadb-server-core', 'mariadb-client-core', 'rabbitmq-server',
    'python3-venv', 'iproute2', 'procps', 'socat', 'e2fsprogs', 'cpio', 'zstd',
    'openssh-server', 'openssh-client']
MACHINE_PACKAGES = [
    'linux-image-amd64', 'systemd-sysv', 'udev', 'kmod', 'dbus', 'pciutils',
    'iproute2', 'procps', 'libvirt-daemon', 'libvirt-daemon-driver-qemu',
    'libvirt-daemon-driver-nodedev', 'libvirt-daemon-log',
    'libvirt-daemon-lock', 'libvirt-clients', 'qemu-system-x86', 'qemu-utils',
    'mdevctl', 'python3-minimal', 'python3-venv', 'python3-libvirt',
    'busybox-static', 'e2fsprogs', 'uuid-runtime', 'openssh-server',
    'openssh-client']
KERNEL_PACKAGES = [
    'linux-headers-amd64', 'linux-source-6.12', 'xz-utils', 'make', 'gcc',
    'libc6-dev', 'bc', 'bison', 'flex', 'libelf-dev', 'libssl-dev',
    'python3-minimal']
#: of nova_accel itself what is not of Nova, and its tests' imitation of libvirt
PYTHON_PACKAGES = [
    'nova', 'keystone', 'glance', 'openstack-placement', 'openstacksdk',
    'python-openstackclient', 'osc-placement', 'python-glanceclient',
    'PyMySQL', 'waitress', 'setuptools', 'cliff', 'PyYAML', 'fixtures',
    'oslotest', 'requests-mock', 'testtools', 'wsgi-intercept',
    'testscenarios', 'ddt', 'hypothesis', 'SQLAlchemy']
MASKED = [
    'systemd-timesyncd.service', 'apt-daily.timer', 'apt-daily-upgrade.timer',
    'e2scrub_all.timer', 'fstrim.timer', 'dpkg-db-backup.timer',
    'logrotate.timer', 'systemd-pstore.service', 'e2scrub_reap.service',
    'libvirt-guests.service', 'systemd-logind.service',
    'systemd-binfmt.service', 'modprobe@drm.service',
    'sys-kernel-debug.mount', 'sys-kernel-tracing.mount', 'uuidd.socket']
#: GiB; two thirds of it only while it builds
DISK = 8
#: what ends with us, and with it all that it started
OURS = ['setpriv', '--pdeathsig', 'KILL', 'unshare', '--pid', '--fork',
        '--kill-child', '--mount-proc']
#: Nova copies disks between hosts by ssh; both have the same pair of keys
SSH = 'IdentityFile /lab/ssh/key\nStrictHostKeyChecking no\n' \
      'UserKnownHostsFile /dev/null\nLogLevel ERROR\n'
SSHD = 'AuthorizedKeysFile /lab/ssh/key.pub\nUsePAM no\n'
CONSTRAINTS = [lab.SOURCE / 'constraints.txt', lab.LAB / 'constraints.txt']


def digest(*what) -> str:
    """Of this file, and of the names and contents of what is given."""
    sum_ = hashlib.sha256()
    for top in (pathlib.Path(__file__), *what):
        files = [top] if top.is_file() else sorted(
            p for p in top.rglob('*') if p.is_file())
        for file in files:
            if '__pycache__' not in file.parts:
                sum_.update(file.name.encode() + b'\0' + file.read_bytes())
    return sum_.hexdigest()


def tree_digest():
    return digest(*CONSTRAINTS)


def image_digest():
    return digest(*CONSTRAINTS, lab.LAB / 'modules', lab.LAB / 'vm/init',
                  lab.LAB / 'vm/lab.service')


def complete(path: pathlib.Path, want: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return (path / 'complete').read_text() == want
    return False


def ready(home: pathlib.Path) -> bool:
    return (complete(home / 'tree', tree_digest())
            and complete(home / 'image', image_digest()))


# what the host is configured for

def apt_sources(top=pathlib.Path('/etc/apt')):
    """(archive, security archive or None) of this host's Debian sources."""
    found = []
    for file in [top / 'sources.list', *sorted(
            (top / 'sources.list.d').glob('*'))]:
        if not file.is_file():
            continue
        text = file.read_text(errors='replace')
        if file.suffix == '.sources':
            for stanza in re.split(r'\n\s*\n', text):
                def words(key):
                    match = re.search(rf'^{key}:[ \t]*(.*)$', stanza,
                                      re.MULTILINE | re.IGNORECASE)
                    return match[1].split() if match else []
                if 'deb' in words('Types'):
                    found += [(uri, suite) for uri in words('URIs')
                              for suite in words('Suites')]
        elif file.suffix == '.list':
            found += re.findall(
                r'^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+.*\bmain\b', text,
                re.MULTILINE)
    names = {'bookworm', 'trixie', 'forky', 'sid', 'stable', 'testing',
             'oldstable'}
    main = [uri for uri, suite in found
            if suite in names and 'security' not in uri]
    security = [uri for uri, suite in found if suite.endswith('-security')]
    if not main:
        raise lab.Unfit(
            'The lab is built from a Debian archive, and the apt sources of '
            'this machine name none: run it on Debian 12 or 13.')
    return main[0].rstrip('/'), security[0].rstrip('/') if security else None


def deb_lines(*suites):
    main, security = apt_sources()
    lines = [f'deb {main} {suite} main'
             for suite in (SUITE, f'{SUITE}-updates', *suites)]
    if security:
        lines.append(f'deb {security} {SUITE}-security main')
    return lines


def pip_environment():
    """The host's settings of pip that make sense in a chroot."""
    wanted = ('PIP_INDEX_URL', 'PIP_EXTRA_INDEX_URL', 'PIP_TRUSTED_HOST')
    env = {k: v for k, v in os.environ.items() if k in wanted
           or k.lower() in ('http_proxy', 'https_proxy', 'no_proxy')}
    parser = configparser.RawConfigParser()
    parser.read(['/etc/pip.conf', os.path.expanduser('~/.pip/pip.conf'),
                 os.path.expanduser('~/.config/pip/pip.conf')])
    for option in ('index-url', 'trusted-host'):
        if parser.has_option('global', option):
            env.setdefault('PIP_' + option.upper().replace('-', '_'),
                           parser.get('global', option))
    return {k: v for k, v in env.items() if not v.startswith('file:')}


# the steps

class Build:

    def __init__(self, home):
        self.home, self.work = home, home / 'work'
        self.log_path = home / 'build.log'
        self.log = open(self.log_path, 'w')
        self.rootfs, self.kernels = self.work / 'rootfs', self.work / 'kernel'
        self.tree = self.work / 'tree'
        self.began = time.monotonic()
        self.running = []

    def stop(self):
        """Let every step fail."""
        for process in self.running:
            process.kill()

    def say(self, text):
        print(f'{time.monotonic() - self.began:6.1f} s  {text}', flush=True)

    def call(self, what, *command, error=lab.Failed, **kw):
        command = [str(c) for c in command]
        self.log.write(f'+ {" ".join(command)}\n')
        self.log.flush()
        process = subprocess.Popen(
            [*OURS, *command], stdout=self.log, stderr=self.log,
            stdin=subprocess.DEVNULL, **kw)
        self.running.append(process)
        if process.wait():
            raise error(f'{what} failed: see {self.log_path}.')

    def chroot(self, what, tree, script, env=None, error=lab.Failed, binds=()):
        """Run a shell script in a tree, in a mount namespace of its own."""
        mounts = ''.join(
            f'mkdir -p "$0/{to}"; mount --bind {source} "$0/{to}"; '
            for source, to in binds)
        self.call(what, 'unshare', '-m', '--propagation', 'private', 'sh',
                  '-ec', f'mount -t proc proc "$0/proc"; '
                  f'mount --rbind /dev "$0/dev"; {mounts}'
                  f'exec chroot "$0" /bin/sh -ec "$1"', tree, script,
                  env={'PATH': '/usr/sbin:/usr/bin:/sbin:/bin',
                       'LC_ALL': 'C.UTF-8', 'HOME': '/root', **(env or {})},
                  error=error)

    def bootstrap(self, target, packages, variant='minbase', suites=(),
                  options=()):
        self.call(
            f'Fetching Debian packages from {apt_sources()[0]}',
            'mmdebstrap', f'--variant={variant}', '--mode=root',
            '--keyring=/usr/share/keyrings/debian-archive-keyring.gpg',
            '--aptopt=APT::Install-Recommends "false"',
            '--aptopt=Acquire::Languages "none"',
            '--aptopt=Acquire::http::Timeout "30"',
            '--aptopt=Acquire::Retries "2"',
            '--dpkgopt=path-exclude=/usr/share/doc/*',
            '--dpkgopt=path-exclude=/usr/share/man/*',
            '--dpkgopt=path-exclude=/usr/share/locale/*', *options,
            '--include=' + ','.join(packages), SUITE, target,
            *deb_lines(*suites), error=lab.Unfit,
            # the machine's initrd is made here, a small one
            env=dict(os.environ, INITRD='No'))

    def version(self, tree, package):
        return subprocess.run(
            ['dpkg-query', '--admindir', tree / 'var/lib/dpkg', '-W', '-f',
             '${Version}', package], capture_output=True, text=True,
            check=True).stdout

    # the tree

    def make_tree(self):
        self.bootstrap(
            self.tree, TREE_PACKAGES, suites=(f'{SUITE}-backports',),
            options=[f'--aptopt=APT::Default-Release "{SUITE}-backports"'])
        self.say(f'QEMU {self.version(self.tree, "qemu-system-x86")}, MariaDB '
                 f'{self.version(self.tree, "mariadb-server-core")}, RabbitMQ '
                 f'{self.version(self.tree, "rabbitmq-server")}')
        self.install(PYTHON_PACKAGES, CONSTRAINTS, '''
            qemu-system-x86_64 -device help | grep -q vfio-user-pci
            python3 -m venv --system-site-packages /opt/openstack
            ''')
        (self.tree / 'etc/hosts').write_text(
            '127.0.0.1 localhost\n10.0.2.2 controller\n')
        (self.tree / 'etc/hostname').write_text('controller\n')
        for name in ('lab', 'src'):
            (self.tree / name).mkdir(exist_ok=True)
        # QEMU's network lets nobody else into the machine
        self.configure_ssh(self.tree, client='BindAddress 127.0.0.1\n',
                           server='ListenAddress 127.0.0.1\n')
        self.say('keystone, glance, placement, nova')

    def install(self, packages, constraints, before=''):
        """Install Python packages in the tree.

        :param constraints: files of pip.
        :param before: commands of the shell that run before, with the network
            of the host.
        """
        for name in ('resolv.conf', 'hosts'):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(f'/etc/{name}', self.tree / 'etc' / name)
        env = pip_environment()
        certificates = pathlib.Path('/etc/ssl/certs/ca-certificates.crt')
        if certificates.exists():
            shutil.copy(certificates, self.tree / 'root/ca.crt')
            env['PIP_CERT'] = '/root/ca.crt'
        options = []
        for i, file in enumerate(constraints):
            shutil.copy(file, self.tree / f'root/{i}.txt')
            options.append(f'-c /root/{i}.txt')
        self.chroot(
            'Fetching Python packages from '
            + env.get('PIP_INDEX_URL', 'https://pypi.org'), self.tree, f'''
            {before}
            /opt/openstack/bin/pip install -q --disable-pip-version-check \\
                --no-cache-dir --timeout 30 --retries 2 \\
                {' '.join(options)} {' '.join(packages)}
            rm -f /root/ca.crt /root/*.txt
            ''', env, error=lab.Unfit)

    @staticmethod
    def configure_ssh(root, client='', server=''):
        (root / 'etc/ssh/ssh_config.d/lab.conf').write_text(SSH + client)
        (root / 'etc/ssh/sshd_config.d/lab.conf').write_text(SSHD + server)

    # the machine

    def make_rootfs(self):
        self.bootstrap(self.rootfs, MACHINE_PACKAGES)
        self.say(f'root file system of the machine: Linux '
                 f'{self.kernel(self.rootfs)}')

    def kernel(self, tree):
        names = [n for n in os.listdir(tree / 'lib/modules')
                 if n.endswith('-amd64')]
        if len(names) != 1:
            raise lab.Failed(f'{tree} was to have one kernel, and has '
                             f'{names}: build again.')
        return names[0]

    def make_modules(self):
        """The kernel's modules that Debian does not build, ours, the probe."""
        self.bootstrap(self.kernels, KERNEL_PACKAGES, variant='apt')
        source = 'linux-source-6.12'
        shutil.copytree(lab.LAB / 'modules', self.kernels / 'usr/src/ext')
        self.chroot('Building kernel modules', self.kernels, f'''
            cd /usr/src
            tar xf {source}.tar.xz {source}/samples/vfio-mdev \\
                {source}/drivers/fpga {source}/drivers/pci/pci.h \\
                {source}/drivers/vfio \\
                {source}/drivers/iommu/iommufd/iova_bitmap.c
            cp {source}/samples/vfio-mdev/*.[ch] ext/mdev/
            mv ext/mdev/mtty.c ext/mdev/mtty_of_linux.c
            cp {source}/drivers/fpga/*.[ch] ext/fpga/
            cp {source}/drivers/vfio/*.[ch] ext/vfio/
            cp {source}/drivers/iommu/iommufd/iova_bitmap.c ext/vfio/
            cp {source}/drivers/pci/pci.h ext/idshift/pci_private.h
            headers=$(ls -d /usr/src/linux-headers-*-amd64)
            for d in fpga mdev idshift vfio; do
                make -s -C $headers M=/usr/src/ext/$d modules
            done
            strip --strip-debug ext/*/*.ko
            cd ext/probe
            gcc -m32 -Os -ffreestanding -fno-pic -fno-stack-protector \\
                -fcf-protection=none -nostdlib -static \\
                -Wl,--build-id=none,-N,-T,probe.ld -o probe.elf probe.c
            strip probe.elf''')
        self.modules = sorted(
            (self.kernels / 'usr/src/ext').glob('*/*.ko'))
        headers, = (self.kernels / 'usr/src').glob('linux-headers-*-amd64')
        self.built_for = headers.name.removeprefix('linux-headers-')
        self.say(f'{len(self.modules)} kernel modules')

    def configure(self):
        root, kernel = self.rootfs, self.kernel(self.rootfs)
        if self.built_for != kernel:
            raise lab.Unfit(
                f'The Debian archive gave kernel {kernel} with headers '
                f'{self.built_for}: build again when it is consistent.')
        # depmod prefers what is there to modules of the kernel's own
        updates = root / 'lib/modules' / kernel / 'updates'
        updates.mkdir()
        for file in self.modules:
            shutil.copy(file, updates)
        # one set of Python packages: both are the same Debian
        self.call('Copying', 'cp', '-a', self.tree / 'opt/openstack',
                  root / 'opt')
        shutil.copy(lab.LAB / 'vm/lab.service', root / 'etc/systemd/system')
        with open(root / 'etc/libvirt/qemu.conf', 'a') as file:
            file.write('user = "root"\ngroup = "root"\n'
                       'security_driver = "none"\nnamespaces = []\n')
        # udev's rule of mdevctl 1.4.0-2 names a file that is in /usr/bin
        if not (root / 'usr/sbin/mdevctl').exists():
            (root / 'usr/sbin/mdevctl').symlink_to('../bin/mdevctl')
        self.configure_ssh(root)
        (root / 'etc/hostname').write_text('vm\n')
        # QEMU's user-mode network shows the lab's loopback as 10.0.2.2
        (root / 'etc/hosts').write_text(
            '127.0.0.1 localhost vm\n10.0.2.2 controller\n')
        (root / 'etc/fstab').write_text(
            '/dev/vda / ext4 defaults,noatime 0 1\n')
        getty = root / 'etc/systemd/system/serial-getty@ttyS0.service.d'
        getty.mkdir()
        (getty / 'root.conf').write_text(
            '[Service]\nExecStart=\nExecStart=-/sbin/agetty -a root '
            '--keep-baud 115200 ttyS0 vt100\n')
        self.chroot('Configuring the machine', root, f'''
            depmod -a {kernel}; passwd -d root
            systemctl enable lab.service
            # all of libvirt starts when its sockets are used
            systemctl disable libvirtd.service virtlogd.service \\
                virtlockd.service
            systemctl enable libvirtd.socket virtlogd.socket virtlockd.socket
            for unit in {' '.join(MASKED)}; do
                systemctl mask $unit || true
            done
            rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /boot/initrd*''')

    def make_image(self):
        out, kernel = self.work / 'image', self.kernel(self.rootfs)
        initrd = self.work / 'initrd'
        for name in ('bin', 'lib', 'proc', 'sys', 'dev', 'root'):
            (initrd / name).mkdir(parents=True)
        shutil.copy(self.rootfs / 'bin/busybox', initrd / 'bin')
        order = []
        for module in ('crc32c_generic', 'virtio_blk', 'ext4'):
            listed = subprocess.run(
                ['chroot', self.rootfs, 'modprobe', '-S', kernel,
                 '--show-depends', module], capture_output=True, text=True)
            for path in re.findall(r'^insmod (\S+)', listed.stdout,
                                   re.MULTILINE):
                name = os.path.basename(path).removesuffix('.xz')
                if name not in order:
                    order.append(name)
                    with lzma.open(f'{self.rootfs}{path}') as file:
                        (initrd / 'lib' / name).write_bytes(file.read())
        (initrd / 'order').write_text('\n'.join(order) + '\n')
        shutil.copy(lab.LAB / 'vm/init', initrd / 'init')
        (initrd / 'init').chmod(0o755)
        out.mkdir()
        shutil.move(self.rootfs / f'boot/vmlinuz-{kernel}', out / 'vmlinuz')
        shutil.copy(self.kernels / 'usr/src/ext/probe/probe.elf', out)
        with open(out / 'disk.ext4', 'wb') as file:
            file.truncate(4 << 30)
        # -d fills the file system from a directory: no loop device
        self.chroot('Making the disk of the machine', self.tree, '''
            cd /lab/initrd
            find . | cpio --quiet -o -H newc | zstd -q -5 -o ../image/initrd
            mke2fs -q -t ext4 -d /lab/rootfs /lab/image/disk.ext4''',
                    binds=[(self.work, 'lab')])
        (out / 'complete').write_text(image_digest())
        self.say('disk of the machine')


def check_host(home):
    """:raises Unfit: when the lab cannot run here."""
    if os.geteuid():
        raise lab.Unfit('The lab makes chroots and namespaces, and you are '
                        'not root: run it as root.')
    if os.uname().machine != 'x86_64':
        raise lab.Unfit(f'The machine of the lab has amd64 devices, and this '
                        f'is {os.uname().machine}: run it on amd64.')
    if not shutil.which('apt-get'):
        raise lab.Unfit('The lab is built with Debian packages, and apt-get is '
                        'not here: run it on Debian 12 or 13.')
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 20
    if memory < 7500:
        raise lab.Unfit(f'The lab needs 8 GiB of memory, and this machine has '
                        f'{memory} MiB.')
    if subprocess.run(['unshare', '-mnp', '--fork', 'true'],
                      capture_output=True).returncode:
        raise lab.Unfit('The lab lives in namespaces, which root may not make '
                        'here: run it outside of an unprivileged container.')
    if ready(home):
        return
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free >> 30
    if free < DISK:
        raise lab.Unfit(f'Building the lab needs {DISK} GiB of disk, and '
                        f'{home} has {free} free: set NOVA_ACCEL_LAB to '
                        f'another directory.')


def host_packages():
    def installed(name):
        return subprocess.run(
            ['dpkg-query', '-W', '-f', '${Status}', name], text=True,
            capture_output=True).stdout == 'install ok installed'
    missing = [name for name in HOST_PACKAGES if not installed(name)]
    if not missing:
        return
    print(f'installing {" and ".join(missing)} on this machine', flush=True)
    options = ['-q', '-o', 'Acquire::http::Timeout=30', '-o',
               'Acquire::Retries=2']
    env = dict(os.environ, DEBIAN_FRONTEND='noninteractive')
    for command in (['update'], ['install', '-y', '--no-install-recommends',
                                 *missing]):
        done = subprocess.run(['apt-get', *options, *command], env=env,
                              capture_output=True, text=True)
    if done.returncode:
        raise lab.Unfit(f'apt-get could not install {" ".join(missing)}: '
                        f'{done.stderr.strip().splitlines()[-1]}')


@contextlib.contextmanager
def alone(home):
    """Two builds at once wait for each other; the lock ends with us."""
    with open(home / 'lock', 'w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print('waiting for another build', flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(home: pathlib.Path) -> None:
    """Make what is missing or older than its ingredients.

    :raises Unfit: when the machine, the mirrors or the index do not allow it.
    """
    check_host(home)
    if ready(home):
        return
    with alone(home):
        if ready(home):
            return
        host_packages()
        shutil.rmtree(home / 'work', ignore_errors=True)
        (home / 'work').mkdir()
        work = Build(home)
        print('building the lab, once; some minutes', flush=True)
        if complete(home / 'tree', tree_digest()):
            work.tree = home / 'tree'
        new_tree = work.tree != home / 'tree'
        new_image = not complete(home / 'image', image_digest())

        def machine():
            work.make_rootfs()
            work.make_modules()
        # mostly dpkg and downloads: two at once
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(job) for job, wanted in (
                (work.make_tree, new_tree), (machine, new_image)) if wanted]
            try:
                for job in concurrent.futures.as_completed(jobs):
                    job.result()
            except BaseException:
                work.stop()
                raise
        if new_image:
            work.configure()
            work.make_image()
            replace(work.work / 'image', home / 'image')
        if new_tree:
            (work.tree / 'complete').write_text(tree_digest())
            replace(work.tree, home / 'tree')
        shutil.rmtree(work.work)
        work.say('built')


def replace(new, old):
    shutil.rmtree(old, ignore_errors=True)
    new.rename(old)
