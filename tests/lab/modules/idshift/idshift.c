// SPDX-License-Identifier: GPL-2.0
/*
 * Lab only: give one unbound PCI function (and the VFs it will make) other ids.
 *
 * The device's config space is untouched.  What changes is what the kernel remembers of
 * it: sysfs vendor/device/class, the modalias that udev and libvirt read, driver matching,
 * and - through sriov->vf_device, which pci_iov_add_virtfn() copies - the ids of its VFs.
 * vfio-pci passes those ids on to the guest, and its denylist looks at them too.
 *
 *   modprobe idshift bdf=0000:03:00.0 [vendor= device= vf_device= class=]
 *
 * Defaults: Intel QAT C62x, PF 8086:37c8, VF 8086:37c9, class 0x0b4000 (co-processor).
 */
#include <linux/module.h>
#include <linux/pci.h>
#include "pci_private.h"	/* drivers/pci/pci.h, copied at build time: struct pci_sriov */

static char *bdf = "";
static uint vendor = 0x8086, device = 0x37c8, vf_device = 0x37c9, class = 0x0b4000;
module_param(bdf, charp, 0444);
module_param(vendor, uint, 0444);
module_param(device, uint, 0444);
module_param(vf_device, uint, 0444);
module_param(class, uint, 0444);

static int __init idshift_init(void)
{
	unsigned int domain, bus, slot, function;
	struct pci_dev *pf;

	if (sscanf(bdf, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
		return -EINVAL;
	pf = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(slot, function));
	if (!pf)
		return -ENODEV;
	if (device_is_bound(&pf->dev) || (pf->is_physfn && pf->sriov->num_VFs)) {
		pci_dev_put(pf);
		return -EBUSY;
	}
	pf->vendor = vendor;
	pf->device = device;
	pf->class = class;
	pf->subsystem_vendor = vendor;
	pf->subsystem_device = 0;
	if (pf->is_physfn)
		pf->sriov->vf_device = vf_device;
	kobject_uevent(&pf->dev.kobj, KOBJ_CHANGE);
	pci_dev_put(pf);
	return 0;
}

static void __exit idshift_exit(void)
{
}

module_init(idshift_init);
module_exit(idshift_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("HIL lab: relabel a PCI function");
