/* Licensed under the Apache License, Version 2.0. See LICENSE. */
/*
 * The "operating system" of the lab's guests: a multiboot 1 kernel that scans
 * all PCI buses through ports 0xcf8/0xcfc (SeaBIOS has assigned the BARs),
 * prints one line per function on COM1, and touches four devices to prove that
 * accesses to BARs reach them:
 *   edu  1234:11e8   BAR0+0 identification, BAR0+4 liveness (reads inverted)
 *   mtty 4348:3253   BAR0 is an 8250: +7 scratch register, +5 line status
 *   test 1b36:0005   BAR2, which may be larger than what is below 4 GiB: where
 *                    the firmware has put it
 *   DFL  8086:09c4   BAR0+0 FME header, port 0's function UUID at +0x60008,
 *                    a register at +0x60018 and a word of memory at +0x60020,
 *                    in which it leaves a secret for the next guest
 *   NVMe 144d:a824   block 2048 of namespace 1, in which it leaves one as well,
 *                    read and written by DMA, without interrupts; where it
 *                    finds DELETE there, it deletes all namespaces instead
 *   NVMe 1b36:0010   the same with namespace 2, where the VF is online
 * Before, it prints on which NUMA node of its own each further PCI host bridge
 * is, as the firmware tells (ACPI, _PXM beside _BBN).
 * Then it halts, so that the guest stays until somebody destroys it. With
 * "hotplug" on its command line it goes on as an operating system would: it
 * lets go of devices that it is asked for, and prints all functions again when
 * one has come (ports of QEMU's q35, docs/specs/acpi_pci_hotplug). Of an mtty it
 * then prints every few seconds what its scratch register has, and does not
 * write that again.
 */
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

__attribute__((section(".mb"), used, aligned(4)))
static const u32 multiboot[3] = { 0x1BADB002, 0, -0x1BADB002 };

/* ebx: where the boot loader tells; an interrupt does no more than end hlt */
__asm__(".globl _start\n"
	"_start: mov $0x500000, %esp; push %ebx; call probe\n"
	"interrupt: push %eax; mov $0x20, %al; outb %al, $0x20; pop %eax; iret\n");
void interrupt(void);

static inline void outb(u16 p, u8 v) { __asm__ volatile("outb %0,%1" :: "a"(v), "Nd"(p)); }
static inline void outl(u16 p, u32 v) { __asm__ volatile("outl %0,%1" :: "a"(v), "Nd"(p)); }
static inline u8 inb(u16 p) { u8 v; __asm__ volatile("inb %1,%0" : "=a"(v) : "Nd"(p)); return v; }
static inline u32 inl(u16 p) { u32 v; __asm__ volatile("inl %1,%0" : "=a"(v) : "Nd"(p)); return v; }

static void putch(char c) { while (!(inb(0x3fd) & 0x20)); outb(0x3f8, c); }
static void print(const char *s) { while (*s) putch(*s++); }
static void hex(u32 v, int digits) { while (digits--) putch("0123456789abcdef"[(v >> (digits * 4)) & 15]); }
static void field(const char *name, u32 v, int digits) { print(name); hex(v, digits); }

/* fn is bus << 8 | device << 3 | function */
static u32 rd(u32 fn, u32 reg) { outl(0xcf8, 0x80000000u | fn << 8 | reg); return inl(0xcfc); }
static void wr(u32 fn, u32 reg, u32 v) { outl(0xcf8, 0x80000000u | fn << 8 | reg); outl(0xcfc, v); }

static volatile u32 *bar0(u32 fn)
{
	wr(fn, 4, rd(fn, 4) | 7);		/* memory, i/o, bus master */
	return (volatile u32 *)(rd(fn, 0x10) & (rd(fn, 0x10) & 1 ? ~3u : ~15u));
}

/* in memory that nothing else uses */
#define QUEUES 0x400000u		/* a page for each: admin, completions, I/O, completions */
#define DATA ((volatile u32 *)0x404000u)
#define ENTRIES 8u
#define BLOCK 2048u
#define DELETE 0xde1e7e00u

static u32 sent[2], namespace;

static int ready(volatile u32 *m, u32 wanted)
{
	u32 i;

	for (i = 0; i < 1u << 20; i++)
		if ((m[0x1c / 4] & 1) == wanted)
			return 1;
	return 0;
}

/* One command of an NVMe controller; its status, 0xffff for no answer. */
static u32 command(volatile u32 *m, u32 queue, u32 opcode, u32 data, u32 dw10, u32 dw11, u32 dw12)
{
	volatile u32 *entry = (volatile u32 *)(QUEUES + queue * 0x2000u + sent[queue] % ENTRIES * 64u);
	volatile u32 *done = (volatile u32 *)(QUEUES + queue * 0x2000u + 0x1000u + sent[queue] % ENTRIES * 16u);
	u32 phase = !(sent[queue] / ENTRIES & 1), i;

	for (i = 0; i < 16; i++)
		entry[i] = 0;
	entry[0] = opcode;
	/* the namespace of an I/O command; all to manage */
	entry[1] = opcode == 13 ? ~0u : queue ? namespace : 0;
	entry[6] = data;
	entry[10] = dw10; entry[11] = dw11; entry[12] = dw12;
	sent[queue]++;
	m[0x1000 / 4 + 2 * queue] = sent[queue] % ENTRIES;
	/* reading a register lets the device work */
	for (i = 0; i < 1u << 20 && (done[3] >> 16 & 1) != phase; i++)
		(void)m[0x1c / 4];
	if ((done[3] >> 16 & 1) != phase)
		return 0xffff;
	m[0x1000 / 4 + 2 * queue + 1] = sent[queue] % ENTRIES;
	return done[3] >> 17;
}

static void nvme(volatile u32 *m)
{
	volatile u32 *memory = (volatile u32 *)QUEUES;
	u32 i, before, status;

	/* no capabilities: a VF that is offline */
	if (!m[0])
		return;
	m[0x14 / 4] = 0;
	if (!ready(m, 0))
		return print("NVME does not end\r\n");
	for (i = 0; i < 0x5000 / 4; i++)
		memory[i] = 0;
	sent[0] = sent[1] = 0;
	m[0x24 / 4] = (ENTRIES - 1) << 16 | (ENTRIES - 1);
	m[0x28 / 4] = QUEUES; m[0x2c / 4] = 0;
	m[0x30 / 4] = QUEUES + 0x1000u; m[0x34 / 4] = 0;
	m[0x14 / 4] = 0x460001;
	if (!ready(m, 1))
		return print("NVME does not begin\r\n");
	status = command(m, 0, 5, QUEUES + 0x3000u, (ENTRIES - 1) << 16 | 1, 1, 0);
	status |= command(m, 0, 1, QUEUES + 0x2000u, (ENTRIES - 1) << 16 | 1, 1 << 16 | 1, 0);
	status |= command(m, 1, 2, (u32)DATA, BLOCK, 0, 0);
	before = DATA[0];
	if (before == DELETE) {
		field("NVME deletes, status=", command(m, 0, 13, 0, 1, 0, 0), 4); print("\r\n");
		m[0x14 / 4] = 0;
		return;
	}
	DATA[0] = 0x5ec2e700;
	status |= command(m, 1, 1, (u32)DATA, BLOCK, 0, 0);
	DATA[0] = 0;
	status |= command(m, 1, 2, (u32)DATA, BLOCK, 0, 0);
	field("NVME status=", status, 4); field(" found=", before, 8);
	field(" left=", DATA[0], 8); print("\r\n");
	/* no DMA may follow the guest */
	m[0x14 / 4] = 0;
}

static int same(const u8 *p, const char *text)
{
	while (*text)
		if (*p++ != *text++)
			return 0;
	return 1;
}

/* An integer of AML: zero, one, or a byte. */
static u32 integer(const u8 *p) { return p[0] == 0x0a ? p[1] : p[0]; }

/* Names in the AML of the DSDT; an object of its own begins with 5b 82. */
static void nodes(void)
{
	const u8 *p = (const u8 *)0xe0000, *table, *end;
	const u32 *entry;
	u32 bus = ~0u;

	while (p < (const u8 *)0x100000 && !same(p, "RSD PTR "))
		p += 16;
	if (p >= (const u8 *)0x100000)
		return print("no RSDP\r\n");
	table = (const u8 *)*(const u32 *)(p + 16);
	end = table + *(const u32 *)(table + 4);
	for (entry = (const u32 *)(table + 36); (const u8 *)entry < end; entry++)
		if (same((const u8 *)*entry, "FACP"))
			break;
	if ((const u8 *)entry >= end)
		return print("no FADT\r\n");
	table = (const u8 *)*(const u32 *)((const u8 *)*entry + 40);
	end = table + *(const u32 *)(table + 4);
	for (p = table + 36; p + 6 < end; p++) {
		if (p[0] == 0x5b && p[1] == 0x82)
			bus = ~0u;
		if (same(p, "_BBN"))
			bus = integer(p + 4);
		if (same(p, "_PXM") && bus != ~0u) {
			field("BRIDGE bus=", bus, 2);
			field(" node=", integer(p + 4), 2); print("\r\n");
		}
	}
}

static u16 mtty;		/* its ports, 0 where there is none */

static void touch(u32 fn, u32 id)
{
	if (id == 0x11e81234) {
		volatile u32 *m = bar0(fn);
		m[1] = 0x12345678;
		field("EDU id=", m[0], 8); field(" inv=", m[1], 8); print("\r\n");
	}
	if (id == 0x32534348) {
		u16 port = (u32)bar0(fn);	/* an i/o BAR; 8 ports, so 8-aligned */
		u8 before = inb(port + 7);

		outb(port + 7, 0x5a);
		field("MTTY scratch=", inb(port + 7), 2); field(" lsr=", inb(port + 5), 2);
		field(" before=", before, 2); print("\r\n");
		mtty = port;
	}
	if (id == 0x00051b36) {
		field("TEST memory=", rd(fn, 4) >> 1 & 1, 1); field(" bar2=", rd(fn, 0x1c), 8);
		hex(rd(fn, 0x18) & ~15u, 8); print("\r\n");
	}
	if (id == 0x09c48086) {
		volatile u32 *m = bar0(fn);
		field("DFL fme=", m[1], 8); hex(m[0], 8);
		field(" afu=", m[0x60014 / 4], 8); hex(m[0x60010 / 4], 8);
		hex(m[0x6000c / 4], 8); hex(m[0x60008 / 4], 8); print("\r\n");
		field("AFU register=", m[0x60018 / 4], 8);
		field(" memory=", m[0x60020 / 4], 8); print("\r\n");
		m[0x60018 / 4] = m[0x60020 / 4] = 0x5ec2e700;
	}
	if (id == 0xa824144d || id == 0x00101b36) {
		namespace = id == 0xa824144d ? 1 : 2;
		nvme(bar0(fn));
	}
}

/* BAR 0 of a device that came later: where its bridge's window begins. */
static void assign(u32 fn)
{
	u32 bridge;

	for (bridge = 0; bridge < fn; bridge++)
		if ((rd(bridge, 0xc) >> 16 & 0x7f) == 1 && (rd(bridge, 0x18) >> 8 & 0xff) == fn >> 8) {
			wr(fn, 0x10, (rd(bridge, 0x20) & 0xfff0) << 16);
			if ((rd(fn, 0x10) & 6) == 4)
				wr(fn, 0x14, 0);
			return;
		}
}

static void scan(void)
{
	u32 fn;

	for (fn = 0; fn < 256 << 8; fn++) {
		u32 id = rd(fn, 0);

		if (id == 0xffffffffu) {
			if (!(fn & 7))
				fn |= 7;	/* no function 0: no device */
			continue;
		}
		if (rd(fn, 8) >> 24 != 6 && !(rd(fn, 0x10) & ~15u))
			assign(fn);
		field("PCI ", fn >> 8, 2); field(":", fn >> 3 & 31, 2); field(".", fn & 7, 1);
		field(" ", id & 0xffff, 4); field(":", id >> 16, 4);
		field(" class=", rd(fn, 8) >> 8, 6); field(" bar0=", rd(fn, 0x10), 8);
		field(" subsys=", rd(fn, 0x2c), 8); print("\r\n");
		touch(fn, id);
		if (!(fn & 7) && !(rd(fn, 0xc) >> 16 & 0x80))
			fn |= 7;		/* single-function device */
	}
}

static int asked(const u32 *info, const char *word)
{
	const u8 *p = (const u8 *)info[4];	/* the command line, if flag 2 */

	for (; (info[0] & 4) && *p; p++)
		if (same(p, word))
			return 1;
	return 0;
}

/* The clock's interrupts wake us, 18 a second. */
static void clock(void)
{
	static const u32 gdt[6] = { 0, 0, 0xffff, 0xcf9b00, 0xffff, 0xcf9300 };
	static u32 idt[2 * 16];
	static struct { u16 size; u32 base; } __attribute__((packed)) g, i;
	u32 n;

	for (n = 0; n < 16; n++) {
		idt[2 * n] = 8 << 16 | ((u32)interrupt & 0xffff);
		idt[2 * n + 1] = ((u32)interrupt & 0xffff0000) | 0x8e00;
	}
	g.size = sizeof(gdt) - 1; g.base = (u32)gdt;
	i.size = sizeof(idt) - 1; i.base = (u32)idt;
	__asm__ volatile("lgdt %0; lidt %1; ljmp $8, $1f; 1: mov %2, %%ds; mov %2, %%es; mov %2, %%ss"
			 :: "m"(g), "m"(i), "r"(16) : "memory");
	outb(0x21, 0xfe); outb(0xa1, 0xff);
	__asm__ volatile("sti");
}

#define UP 0xcc0
#define DOWN 0xcc4
#define EJECT 0xcc8
#define BUS 0xcd0

static void hotplug(void)
{
	u32 bus, slots, ticks = 0;

	for (;;) {
		int came = 0;

		__asm__ volatile("hlt");
		if (mtty && !(++ticks & 63)) {
			field("MTTY still ", ticks >> 6, 4);
			field(" scratch=", inb(mtty + 7), 2); print("\r\n");
		}
		for (bus = 0; bus < 32; bus++) {
			outl(BUS, bus);
			came |= (slots = inl(UP)) && slots != ~0u;
			if ((slots = inl(DOWN)) && slots != ~0u) {
				outl(EJECT, slots);
				print("LET GO\r\n");
			}
		}
		if (came) {
			print("SOMETHING CAME\r\n");
			scan();
			print("PROBE DONE\r\n");
		}
	}
}

void probe(const u32 *info)
{
	print("PROBE UP\r\n");
	nodes();
	scan();
	print("PROBE DONE\r\n");
	if (asked(info, "hotplug")) {
		clock();
		hotplug();
	}
	for (;;)
		__asm__ volatile("hlt");
}
