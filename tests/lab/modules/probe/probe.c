/* Licensed under the Apache License, Version 2.0. See LICENSE. */
/*
 * The "operating system" of the lab's guests: a multiboot 1 kernel that scans
 * PCI buses 0..31 through ports 0xcf8/0xcfc (SeaBIOS has assigned the BARs),
 * prints one line per function on COM1, and touches three devices to prove
 * that accesses to BARs reach them:
 *   edu  1234:11e8   BAR0+0 identification, BAR0+4 liveness (reads inverted)
 *   mtty 4348:3253   BAR0 is an 8250: +7 scratch register, +5 line status
 *   DFL  8086:09c4   BAR0+0 FME header, port 0's function UUID at +0x60008,
 *                    a register at +0x60018 and a word of memory at +0x60020,
 *                    in which it leaves a secret for the next guest
 * Then it halts, so that the guest stays until somebody destroys it.
 */
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

__attribute__((section(".mb"), used, aligned(4)))
static const u32 multiboot[3] = { 0x1BADB002, 0, -0x1BADB002 };

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

void _start(void)
{
	u32 fn;

	print("PROBE UP\r\n");
	for (fn = 0; fn < 32 << 8; fn++) {
		u32 id = rd(fn, 0);

		if (id == 0xffffffffu) {
			if (!(fn & 7))
				fn |= 7;	/* no function 0: no device */
			continue;
		}
		field("PCI ", fn >> 8, 2); field(":", fn >> 3 & 31, 2); field(".", fn & 7, 1);
		field(" ", id & 0xffff, 4); field(":", id >> 16, 4);
		field(" class=", rd(fn, 8) >> 8, 6); field(" bar0=", rd(fn, 0x10), 8);
		field(" subsys=", rd(fn, 0x2c), 8); print("\r\n");
		if (id == 0x11e81234) {
			volatile u32 *m = bar0(fn);
			m[1] = 0x12345678;
			field("EDU id=", m[0], 8); field(" inv=", m[1], 8); print("\r\n");
		}
		if (id == 0x32534348) {
			u16 port = (u32)bar0(fn);	/* an i/o BAR; 8 ports, so 8-aligned */
			outb(port + 7, 0x5a);
			field("MTTY scratch=", inb(port + 7), 2); field(" lsr=", inb(port + 5), 2); print("\r\n");
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
		if (!(fn & 7) && !(rd(fn, 0xc) >> 16 & 0x80))
			fn |= 7;		/* single-function device */
	}
	print("PROBE DONE\r\n");
	for (;;)
		__asm__ volatile("hlt");
}
