// SPDX-License-Identifier: GPL-2.0
/*
 * Lab only: the kernel's sample mtty with a second parent, mtty2, as the card of a second
 * host. Both have the same driver, types and room (mdev_avail_ports).
 */
#include <linux/module.h>
#pragma push_macro("module_init")
#pragma push_macro("module_exit")
#undef module_init
#undef module_exit
#define module_init(f)
#define module_exit(f)
#include "mtty_of_linux.c"
#pragma pop_macro("module_init")
#pragma pop_macro("module_exit")

/* a type belongs to one parent */
static struct mtty_type twin_types[ARRAY_SIZE(mtty_types)];
static struct mdev_type *twin_type[ARRAY_SIZE(mtty_types)];
static struct mdev_parent twin_parent;
static struct device twin;

static int __init twins_init(void)
{
	int i, ret = mtty_dev_init();

	if (ret)
		return ret;
	for (i = 0; i < ARRAY_SIZE(mtty_types); i++) {
		twin_types[i].nr_ports = mtty_types[i].nr_ports;
		twin_types[i].type.sysfs_name = mtty_types[i].type.sysfs_name;
		twin_types[i].type.pretty_name = mtty_types[i].type.pretty_name;
		twin_type[i] = &twin_types[i].type;
	}
	twin.class = mtty_dev.dev.class;
	twin.release = mtty_device_release;
	dev_set_name(&twin, "mtty2");
	ret = device_register(&twin);
	if (!ret)
		ret = mdev_register_parent(&twin_parent, &twin, &mtty_driver, twin_type,
					   ARRAY_SIZE(twin_type));
	/* the module stays all the same, and is not to be unloaded */
	if (ret)
		pr_err("no mtty2: %d\n", ret);
	return 0;
}

static void __exit twins_exit(void)
{
	mdev_unregister_parent(&twin_parent);
	device_unregister(&twin);
	mtty_dev_exit();
}

module_init(twins_init)
module_exit(twins_exit)
