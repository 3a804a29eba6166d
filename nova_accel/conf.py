# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The options of nova_accel, in the section [accel] of nova.conf."""

import difflib
import glob
import importlib.util
import os
import socket

from oslo_config import cfg

GROUP = cfg.OptGroup('accel', title='Accelerators', help="""
Accelerators, which nova-compute reports, programs and attaches, and
among which nova-scheduler chooses.""")

COMPUTE_OPTS = [
    cfg.ListOpt('enabled_drivers', default=[], help="""
The drivers that look for devices on this host, by entry point name in
nova_accel.drivers, for example ``dfl``. Devices of other drivers are ignored.
Read by nova-compute and nova-accel."""),
    cfg.StrOpt('simulated_host', help="""
Use the host described in this YAML file instead of the machine's own devices,
for trials of Placement and of the scheduler without hardware, or a file of
``nova-accel capture``. libvirt refuses such devices, and no server starts
with one; ``make demo`` shows servers. nova-compute keeps the state of the host
beside the file, in a directory that it must be able to write. A directory
means its file ``<host>.yaml``, where <host> is [DEFAULT] host."""),
    cfg.StrOpt('resource_classes', default='custom',
               choices=[('custom', 'CUSTOM_ACCELERATOR_<TYPE>'),
                        ('standard', 'FPGA, PGPU, VGPU where os-resource-'
                                     'classes has one for the type')], help="""
Spelling of the resource classes of accelerators in Placement. Set the same
value for every nova-compute, nova-api and nova-scheduler. Changing it on a
host where servers hold accelerators is not supported."""),
    cfg.StrOpt('owner_trait', default='OWNER_CYBORG',
               regex='^(OWNER_CYBORG|CUSTOM_[A-Z0-9_]{1,248})$', help="""
The trait that marks our providers as owned by an accelerator service rather
than by Nova's own PCI or vGPU code: OWNER_CYBORG, or a trait of yours that
begins with ``CUSTOM_``."""),
    cfg.MultiStrOpt('function_class', default=[], help="""
``<CLASS>:<function UUID>``: while that function is loaded its region has the
trait CUSTOM_FPGA_<CLASS>, for example CUSTOM_FPGA_NETWORK. May be given
several times. Example: ``COMPUTE:d8424dc4-a4a3-c413-f89e-433683f9040b``."""),
    cfg.ListOpt('fixed_devices', default=[], help="""
PCI addresses of devices that are never reprogrammed. They are offered with
their present function."""),
    cfg.ListOpt('whole_cards', default=[], help="""
PCI addresses of FPGA cards whose servers may program, reset and flash them.
Under DFL such a card is one with one port and without VFs, and is given to
guests by its physical function; other DFL cards are given by their VFs only.
Under XRT it is named by its management function, and the requests of its
mailbox stay as they are; of other cards nova-compute closes those that change
the card. What a server leaves in such a card counts as its project's, and is
replaced before another server gets it. Example: ``0000:5e:00.0``."""),
    cfg.MultiStrOpt('include_devices', default=[], help="""
A driver of which one of these rules matches a device reports only devices that
match one; other drivers report all. The drivers gpu and nvme offer only devices
that match one. A rule is a list of
``key=value`` pairs with the keys address (PCI), vendor and product (four hex
digits), and subsystem (``10de:1533``), by which boards of one product differ.
All pairs have to match; ``*`` and ``?`` are wildcards. May be given several
times. Example: ``vendor=8086 product=09c4``."""),
    cfg.MultiStrOpt('exclude_devices', default=[], help="""
Devices that match one of these rules are ignored, even if include_devices
matches too. An address can also be that of a single VF. Example:
``address=0000:3b:*``."""),
    cfg.ListOpt('virtual_functions', default=[], help="""
``<PCI address of a physical function>=<number>``: number of VFs that
nova-compute creates if the function has none, at its start and later while no
server has the device, for the drivers dfl, gpu, qat, nvme, vgpu and pci. VFs
that exist already and may be in use are not changed. Example:
``0000:3d:00.0=16``."""),
    cfg.ListOpt('vgpu_types', default=[], help="""
Types of vGPUs to create, the preferred ones first, by the vendor's name. The
name in mdev_supported_types and the number work too, but an update of the host
may change them. Items ``<PCI address>=<type>`` replace the other items for
that GPU. By default every type that the GPU offers is used. Example:
``A40-2Q,0000:41:00.0=L40S-4Q``."""),
    cfg.ListOpt('xe_quotas', default=[], help="""
What each VF of a GPU of Intel gets under the driver xe, ``<PCI address of the
GPU>/<attribute>=<number>``: ``vram_quota`` (bytes, Linux 7.0),
``exec_quantum_ms`` and ``preempt_timeout_us`` (6.19). nova-compute writes them
before it creates the VFs. Without them the VFs have equal parts of the memory,
and no limit of time. Example: ``0000:03:00.0/vram_quota=4294967296,
0000:03:00.0/exec_quantum_ms=20``."""),
    cfg.StrOpt('pools', default='host',
               choices=[('host', 'all that are alike share one'),
                        ('numa_node', 'those of each NUMA node share one'),
                        ('none', 'each device has one of its own')], help="""
Which devices share one resource provider in Placement. Devices of the drivers
gpu, nvme, pci and qat that are alike in type, product, driver and traits are
equal for the scheduler, and with one provider for each, a server that asks for
eight of them is scheduled only after minutes, or never. A server may get all
devices of a host from one provider; with ``numa_node`` all of one node, and
from two nodes by two request groups. When the value changes, the allocations
of servers move at the next start of nova-compute. FPGAs and vGPUs always have
providers of their own."""),
    cfg.MultiStrOpt('device_sets', default=[], help="""
PCI addresses of devices that servers get only together, separated by spaces,
for example the GPUs of a partition of NVSwitches. A set has a resource
provider of its own, from which a request group gets all of it or nothing: with
a set of four GPUs, ``resources1:CUSTOM_ACCELERATOR_GPU=4``. The devices of a
set are of one type, given whole (drivers gpu, nvme and pci) or by the one VF
that each has, as GPUs of AMD under gim; each is in one set only. May be given
several times. Example: ``0000:1a:00.0 0000:1b:00.0 0000:1c:00.0
0000:1d:00.0``."""),
    cfg.StrOpt('fabric_command', help="""
What activates the partition of a set of GPUs under NVSwitches before their
guest starts, and deactivates it after. ``libnvfm``: nova-compute asks NVIDIA's
Fabric Manager at 127.0.0.1:6666 by its library; ``libnvfm:<address>`` another
one, by <IPv4 address>:<port> or the path of its socket; gpu_modules is needed
too. An absolute path: that command of the operator's is run as the user of
nova-compute, one at a time, with ``activate`` or ``deactivate`` and the PCI
addresses of the set, sorted; it ends with 0 where that is done, or was before.
``static``: nothing is run, and partitions stay as the operator has set them up.
Without it, such sets are not offered. vGPUs of such GPUs are offered with
``static``, and with ``libnvfm`` those that have all of a GPU, whose partition
is activated with their VF. Example: ``libnvfm``."""),
    cfg.ListOpt('gpu_modules', default=[], help="""
``<PCI address of a GPU>=<module>``: the number by which NVIDIA's Fabric Manager
knows a GPU; ``Module ID`` of ``nvidia-smi -q``, while the host has the
driver of NVIDIA. It depends on the board, not on the order of the addresses.
Example: ``0000:1a:00.0=2,0000:1b:00.0=4``."""),
    cfg.IntOpt('discovery_interval', default=60, min=1, help="""
Seconds after which nova-compute checks for added and removed devices, and for
their health. It does so when Nova reports what the host has: a value below
``[DEFAULT] update_resources_interval``, by default 60, changes nothing. Signals
of the bus, which are cheap, are read four times in the interval in any case.
Events of the kernel about devices are handled at once."""),
    cfg.IntOpt('discovery_timeout', default=60, min=1, help="""
Seconds that a scan of the devices may take, all of them side by side. A device
that takes longer is fenced alone; the start of nova-compute waits for it
once."""),
    cfg.ListOpt('health', default=['observe'], help="""
What nova-compute does about reports of the health of devices: ``<mode>`` for
all signals, ``<signal>=<mode>`` for one. With ``observe`` it logs findings and
shows them to the operator; nothing else changes. With ``act`` a device that is
suspect has the trait CUSTOM_ACCELERATOR_SUSPECT and is given to servers last,
one that is not fit is given to no server, and owners are informed; signals that
the documentation calls new stay with ``observe`` unless they are named. With
``off`` nothing is read. Example: ``act,link_speed=off``."""),
    cfg.StrOpt('metrics_file', help="""
Absolute path of a file that nova-compute replaces each discovery_interval, and
when the health of a device changes, with the states and the use of devices as
metrics for the textfile collector of node_exporter: a name that ends in
``.prom``, in a directory that nova-compute may write. Without it none is
written. Example:
``/var/lib/prometheus/node-exporter/nova_accel.prom``."""),
    cfg.StrOpt('metrics_group', help="""
Group of the user of node_exporter, and of the user of nova-compute. With it
metrics_file also has the use of devices and their states by project, and only
this group and nova-compute's user can read the file (mode 0640). Without it the
file names no project, and every user can read it. Example:
``prometheus``."""),
    cfg.IntOpt('device_timeout', default=30, min=1, help="""
Seconds that creating or removing one vGPU may take. One that takes longer is
not given to a server until it has ended."""),
    cfg.IntOpt('runtime_programming_interval', default=30, min=1, help="""
Seconds after which nova-compute checks again whether an owner requests another
bitstream in a server's metadata ``accel:bitstream_id``. nova-compute reads
these images with the credentials of [service_user]."""),
    cfg.IntOpt('runtime_programming_pause', default=60, min=0, help="""
Seconds that have to pass between two programmings of the same region at run
time. An owner who asks sooner waits, and other servers of the host are not
delayed."""),
    cfg.IntOpt('programming_timeout', default=300, min=1, help="""
Seconds that programming one region may take. A region that takes longer is
quarantined until its driver reports it again."""),
    cfg.ListOpt('handover', default=[], help="""
What is done with a device when a server releases it, before another one gets
it: ``<policy>`` for all devices, ``<driver>=<policy>`` for those of a driver,
``<key>=<value> ...=<policy>`` for those that these pairs match as a rule of
``include_devices``, ``<PCI address>=<policy>`` for one. An address counts
before a rule, the first rule that matches before the driver. Policies are
``clear`` (the default), which resets the device and takes away what the server
left, ``reset``, which only resets it, ``bus``, which is ``clear`` with a reset
of the bus of a function that is alone on it, ``shown``, which is ``bus`` and
demands that a GPU shows that its memory is clear, ``none``, and ``operator``:
the device stays reserved until the operator lowers ``reserved`` of its
provider in Placement. A device for which this fails is not given to another
server. Example: ``clear,gpu=reset,vendor=144d
product=a8*=none,0000:3b:00.0=operator``."""),
    cfg.MultiStrOpt('pci_devices', default=[], help="""
Devices of the driver ``pci``, by rules of ``key=value`` pairs. These keys
select devices: vendor and product (four hex digits), subsystem
(``10de:1533``), class (six), address (PCI), driver (of the kernel). All given
pairs have to match; ``*`` and ``?`` are wildcards. These keys describe them:
type (required) leads to the resource class CUSTOM_ACCELERATOR_<type>; traits
adds traits, separated by commas; name replaces the product's id;
``vfs=together`` gives all VFs of a function as one accelerator. The first rule
that matches counts. May be given several times. Example: ``vendor=1da3
product=10?? type=AI traits=CUSTOM_AI_TRAINING name=GAUDI``."""),
    cfg.MultiStrOpt('device_traits', default=[], help="""
Traits that you give devices, by rules of ``key=value`` pairs: vendor, product,
subsystem and address as in ``include_devices`` select devices, all given pairs
have to match; ``traits`` (required) are what they get, custom traits with ``,``
between them. A device gets those of all rules that match. For flavors, which
may require or prefer them (``accel1:prefer``). May be given several times.
Example: ``vendor=10de product=26b9 traits=CUSTOM_TIER_GOLD``."""),
    cfg.ListOpt('near', default=[], help="""
In which domains this host is, ``<level>=<domain>``, the nearest level first,
for servers that have to be near each other (``accel:near`` of flavors). Levels
are names of yours: lower-case letters and digits. A domain is a trait that
begins with ``CUSTOM_NEAR_<LEVEL>_``; or the absolute path of a file that has
its name, or of a command that prints it; or, for the level ``nvlink``,
``auto``: the cluster and the clique that NVIDIA's driver of the host reports.
A host is in one domain of a level. Files and commands are read again each
discovery_interval. Example:
``nvlink=auto,rail=CUSTOM_NEAR_RAIL_3,rack=CUSTOM_NEAR_RACK_R7``."""),
    cfg.ListOpt('qat_services', default=[], help="""
Services of QAT cards of generation 4 and later, set at the start of
nova-compute if the card has no VFs: ``<services>`` for all cards, ``<PCI
address of the physical function>=<services>`` for one. Services are sym, asym,
dc, dcc and decomp, joined by ``;`` if the card supports the combination.
Example: ``sym;asym,0000:6d:00.0=dc``."""),
    cfg.ListOpt('ptp_devices', default=[], help="""
PCI addresses of further PTP hardware clocks for the driver timecard, which
always finds OCP time cards. The clock of a network card is refused. Example:
``0000:04:00.0``."""),
]

BITSTREAM_OPTS = [
    cfg.StrOpt('bitstream_cache', default='$state_path/accel_bitstreams',
               help="""
Directory of nova-compute for the bitstreams that it fetched from Glance."""),
    cfg.ListOpt('bitstream_owners', default=[], help="""
IDs of the projects whose images are the operator's bitstreams, as all public
images are. Only what the operator's images put into a region is shown in
Placement and kept for the next server. If set, nova-compute fetches what a
flavor names, where it is the operator's, with the credentials of
[service_user]: these images need not be visible to tenants. Example:
``3f2c0b7a9d5e4c18a6b0d7e1f4932c85``."""),
    cfg.IntOpt('bitstream_cache_size', default=4096, min=0, help="""
Size limit of the bitstream cache in MiB. The least recently used bitstreams
are removed first, and none that a server of the host has."""),
    cfg.IntOpt('bitstream_max_size', default=1024, min=1, help="""
Size limit of a bitstream in MiB. Larger images are refused."""),
    cfg.IntOpt('glance_timeout', default=60, min=1, help="""
Seconds to wait for each answer of Glance."""),
]

PROFILE_OPTS = [
    cfg.StrOpt('device_profiles', default='/etc/nova/device_profiles',
               help="""
A YAML file of device profiles, or a directory of such files. Read by
nova-api when a server is created or resized with a flavor that has
``accel:device_profile``; a changed file takes effect at the next request. Of a
directory ``*.yaml`` and ``*.yml`` are read. A malformed file is named in the
log of nova-api, and what was good in it before stays in force."""),
]

API_OPTS = [
    cfg.BoolOpt('allow_snapshot_boot', default=False, help="""
Whether a server with accelerators may be created from a snapshot of a server
with accelerators. The snapshot's software may expect a function that the new
server's flavor does not give. Read by nova-api."""),
]

SCHEDULER_OPTS = [
    cfg.FloatOpt('weight_multiplier', default=10.0, help="""
How much counts which functions a host's regions carry and how full it is,
against Nova's own weights. An aggregate's metadata ``accel_weight_multiplier``
takes precedence, as with Nova's own weighers. With zero neither counts."""),
    cfg.StrOpt('packing', default='stack',
               choices=[('stack', 'from where fewest are free: whole hosts '
                                  'stay whole'),
                        ('spread', 'from where most are free')], help="""
From which hosts, and from which pools of a host, servers get accelerators of
which they want no function. With ``stack``, servers without accelerators go to
hosts without free accelerators first. Either counts more than Nova's own
weights of RAM, CPU, disk and I/O; less than what a server asks for, and than a
tenant's server group. A flavor's ``accel:packing`` takes precedence. Read by
nova-scheduler."""),
]

ALL_OPTS = [*COMPUTE_OPTS, *BITSTREAM_OPTS, *PROFILE_OPTS, *API_OPTS,
            *SCHEDULER_OPTS]

#: those that a capture has; the others say where things are on a host, or in
#: OpenStack
CAPTURED_OPTS = [option for option in COMPUTE_OPTS
                 if option.name not in ('simulated_host', 'owner_trait')]

CONF = cfg.CONF
CONF.register_group(GROUP)
CONF.register_opts(ALL_OPTS, group=GROUP)


def register_novas() -> None:
    """Register the options of Nova to which those of nova_accel refer.

    For a process that does not load Nova's options: a command, or a privileged
    process.
    """
    # as nova.conf.netconf and nova.conf.paths do
    for option in (cfg.StrOpt('host', default=socket.gethostname()),
                   cfg.StrOpt('pybasedir', default=_nova_directory()),
                   cfg.StrOpt('state_path', default='$pybasedir')):
        try:
            CONF.register_opt(option)
        except cfg.DuplicateOptError:
            pass


def _nova_directory() -> str:
    found = importlib.util.find_spec('nova')
    package = found.origin if found and found.origin else __file__
    return os.path.abspath(os.path.join(os.path.dirname(package), '..'))


def files() -> list[str]:
    """Return the configuration files that were read, in their order."""
    try:
        found, directories = [*CONF.config_file], CONF.config_dir
    except cfg.NoSuchOptError:
        # no configuration was read
        return []
    for directory in directories:
        found += sorted(glob.glob(os.path.join(directory, '*.conf')))
    return found


def sections() -> dict[str, dict[str, list[str]]]:
    """What the configuration files say, without regard to what is registered.

    Names of sections are in lower case, as oslo.config compares them; DEFAULT
    is as it is.

    :returns: section -> option -> values.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for file in files():
        parsed: dict[str, dict[str, list[str]]] = {}
        cfg.ConfigParser(file, parsed).parse()
        for name, values in parsed.items():
            mine = found.setdefault(
                name if name == 'DEFAULT' else name.lower(), {})
            for option, texts in values.items():
                mine.setdefault(option, []).extend(texts)
    return found


def unknown() -> list[str]:
    """A sentence for each option in [accel] that does not exist, and for
    each section that is taken for [accel]."""
    known = {name for option in ALL_OPTS
             for name in (option.name, option.dest)}
    there = sections()
    result = [
        f'nova.conf has {sorted(options.keys() & known)[0]} in a section '
        f'[{name}], which has no effect: write [accel].'
        for name, options in there.items()
        if name != 'accel' and options.keys() & known and _is_like(name)]
    for name in sorted(there.get('accel', {}).keys() - known):
        near = difflib.get_close_matches(name, sorted(known), 1)
        result.append(
            f'[accel] has {name!r}, which is not an option of nova_accel and '
            f'has no effect: '
            + (f'write {near[0]}.' if near else 'correct or remove it.'))
    return result


def _is_like(section: str) -> bool:
    """Whether a section that no service reads is taken for accel."""
    return section not in CONF and bool(
        'accel' in section
        or difflib.get_close_matches(section, ['accel'], 1))


def malformed() -> list[str]:
    """A sentence for each option in [accel] whose value is not of its type."""
    return [f'[accel] {name} cannot be read ({why}): correct it.'
            for name, why in unreadable().items()]


def unreadable() -> dict[str, str]:
    """Return why the value of an option in [accel] is not of its type."""
    found = {}
    for option in ALL_OPTS:
        try:
            getattr(CONF.accel, option.dest)
        except (cfg.Error, ValueError) as error:
            found[option.name] = why_invalid(error)
    return found


def why_invalid(error: Exception) -> str:
    """What is wrong with a value, of an error of oslo.config about it."""
    # ConfigSourceValueError (10.7) has no attributes; before this it names the
    # option, and prints its own objects
    return ' '.join(str(error).partition(' is not valid: ')[2].split()) or (
        ' '.join(str(error).split()))


def list_opts():
    """Return the options for oslo-config-generator."""
    return [(GROUP, ALL_OPTS)]
