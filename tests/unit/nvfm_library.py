# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A libnvfm with a Fabric Manager of two partitions, made by a C compiler."""

import os
import shutil
import subprocess

import fixtures

from nova_accel.host import nvfm

#: names, arguments and layouts as in nv_fm_agent.h and nv_fm_types.h; what is
#: active outlives the process, as it does with Fabric Manager
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned version; char address[256]; unsigned milliseconds;
                 unsigned is_socket; enum { NONE, INET } kind; } parameters;
typedef struct { unsigned module; char uuid[80], bus[32];
                 unsigned links, most, rate; } gpu;
typedef struct { unsigned id, active, count; gpu gpus[16]; } partition;
typedef struct { unsigned version, count, most; partition all[64]; } list;
#define HANDLE ((void *)0x123456789abcUL)
typedef struct { unsigned domain, bus, device, function; } function;
static char *active(unsigned id)
{
    static char path[4096];
    snprintf(path, sizeof path, "%s/active%u", getenv("NVFM_DIRECTORY"), id);
    return path;
}
int fmLibInit(void) { return 0; }
int fmLibShutdown(void) { return 0; }
int fmConnect(parameters *p, void **handle)
{
    if (p->version != (sizeof *p | 2 << 24))
        return -6;
    if (strcmp(p->address, "192.0.2.1:6666") || p->kind != INET)
        return -9;
    *handle = HANDLE;
    return 0;
}
int fmDisconnect(void *handle) { return 0; }
int fmGetSupportedFabricPartitions(void *handle, list *found)
{
    if (handle != HANDLE)
        return -1;
    if (found->version != (sizeof *found | 1 << 24))
        return -6;
    found->count = 2;
    for (int i = 0; i < 2; i++) {
        found->all[i].id = 5 + i;
        found->all[i].active = !access(active(5 + i), F_OK);
        found->all[i].count = 2 - i;
        found->all[i].gpus[0].module = 4;
        found->all[i].gpus[1].module = 2;
    }
    return 0;
}
int fmActivateFabricPartitionWithVFs(
    void *handle, unsigned id, function *vfs, unsigned count)
{
    FILE *file;
    if (handle != HANDLE || id < 5 || id > 6 || count && count != 7 - id)
        return -1;
    if (!access(active(id), F_OK))
        return -7;
    file = fopen(active(id), "w");
    for (unsigned i = 0; i < count; i++)
        fprintf(file, "%04x:%02x:%02x.%x ", vfs[i].domain, vfs[i].bus,
                vfs[i].device, vfs[i].function);
    return fclose(file);
}
int fmActivateFabricPartition(void *handle, unsigned id)
{
    return fmActivateFabricPartitionWithVFs(handle, id, 0, 0);
}
int fmDeactivateFabricPartition(void *handle, unsigned id)
{
    if (handle != HANDLE || id < 5 || id > 6)
        return -1;
    return unlink(active(id)) ? -4 : 0;
}
"""


class NvfmLibrary(fixtures.Fixture):
    """Programs find the library; its partition 5 has the modules 4 and 2, its
    partition 6 the module 4."""

    def _setUp(self):
        compiler = shutil.which('cc')
        if not compiler:
            raise AssertionError('cc is missing: install gcc (bindep.txt).')
        self._directory = self.useFixture(fixtures.TempDir()).path
        source = os.path.join(self._directory, 'nvfm.c')
        with open(source, 'w') as file:
            file.write(_SOURCE)
        subprocess.run([compiler, '-shared', '-fPIC', '-o', os.path.join(
            self._directory, nvfm.LIBRARY), source], check=True)
        for name in 'LD_LIBRARY_PATH', 'NVFM_DIRECTORY':
            self.useFixture(fixtures.EnvironmentVariable(
                name, self._directory))

    def active(self, number):
        """The VFs with which a partition is active, None where it is not."""
        try:
            with open(os.path.join(self._directory, f'active{number}')) as file:
                return file.read().split()
        except FileNotFoundError:
            return None
