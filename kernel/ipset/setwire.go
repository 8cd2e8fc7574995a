package ipset

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
)

// The netlink interface of ipset, from linux/netfilter/ipset/ip_set.h. vishvananda/netlink has one too, but it sends one entry
// a message, and none that newer kernels take for bitmap:port.
const (
	ipsetProtocol = 6 // the oldest that all kernels speak

	ipsetCreate  = 2
	ipsetDestroy = 3
	ipsetSwap    = 6
	ipsetList    = 7
	ipsetAdd     = 9
	ipsetDelete  = 10
	ipsetTest    = 11
	ipsetType    = 13
	ipsetNameOf  = 15
)

// Attributes of a command.
const (
	setAttrProtocol    = 1
	setAttrName        = 2
	setAttrType        = 3
	setAttrOtherName   = 3
	setAttrRevision    = 4
	setAttrFamily      = 5
	setAttrFlags       = 6
	setAttrData        = 7
	setAttrEntries     = 8
	setAttrLine        = 9
	setAttrMinRevision = 10
	setAttrIndex       = 11
)

// Attributes of a set or an entry.
const (
	dataIP       = 1
	dataCIDR     = 3
	dataPort     = 4
	dataPortTo   = 5
	dataTimeout  = 6
	dataProtocol = 7
	dataFlags    = 8
	dataLine     = 9
	// Of a set.
	dataMaxElem    = 19
	dataNetmask    = 20
	dataElements   = 24
	dataReferences = 25
	// Of an entry.
	dataIP2   = 20
	dataCIDR2 = 21
	dataMark  = 27
)

const (
	flagListNames  = 1 << 1
	flagListHeader = 1 << 2

	flagWithMarks = 1 << 6
)

// Errors of ipset's own.
const (
	ipsetNoSuchType   = 4098
	ipsetBusy         = 4100
	ipsetTypeMismatch = 4102
	ipsetExists       = 4103 // or, of a test: does not
	ipsetOutOfRange   = 4352 // of bitmaps
	ipsetFull         = 4352
)

// setError is an error of ipset's own.
type setError struct {
	number int32
	entry  int // which entry of a message failed, from 1 on; or 0
}

var setErrors = map[int32]string{
	4097:              "the kernel does not understand this; an address may be of another family than the set (IPSET_ERR_PROTOCOL)",
	ipsetNoSuchType:   "the kernel lacks this type of set, or this revision of it (IPSET_ERR_FIND_TYPE)",
	4099:              "there are as many sets as can be (IPSET_ERR_MAX_SETS)",
	ipsetBusy:         "it is in use (IPSET_ERR_BUSY)",
	ipsetTypeMismatch: "the types do not agree (IPSET_ERR_TYPE_MISMATCH)",
	4104:              "a range of this length is not taken (IPSET_ERR_INVALID_CIDR)",
	ipsetFull:         "the set is full (IPSET_ERR_HASH_FULL)",
}

func (e setError) Error() string {
	return cmp.Or(setErrors[e.number], fmt.Sprintf("ipset error %d", e.number))
}

// explain makes a setError of an error of ipset's own, and returns any other as it is.
func explain(err error) error {
	if e := (*netlink.SubsystemError)(nil); errors.As(err, &e) {
		return setError{number: e.Number, entry: failedEntry(e.Request)}
	}
	return err
}

// failedEntry finds in the echo of a request, with which an error comes, the number that the kernel wrote there.
func failedEntry(request []byte) int {
	attributes := request[min(unix.SizeofNlMsghdr+nfHeader, len(request)):]
	return int(netlink.Number(netlink.Attribute(attributes, setAttrLine)))
}

const nfHeader = 4

// behindHeader returns the attributes in the body of a message.
func behindHeader(body []byte) []byte { return body[min(nfHeader, len(body)):] }

// setMessage is a request about a set; content appends what comes after the name, if there is more.
func setMessage(command uint16, flags uint16, name string, content func(netlink.Buffer) netlink.Buffer) netlink.Message {
	body := netlink.Buffer{unix.AF_UNSPEC, 0, 0, 0} // family, version, resource: only the last two have to be 0
	body = body.Bytes(setAttrProtocol, ipsetProtocol)
	if name != "" {
		body = body.Text(setAttrName, name)
	}
	if content != nil {
		body = content(body)
	}
	return netlink.Message{Type: unix.NFNL_SUBSYS_IPSET<<8 | command, Flags: flags, Body: body}
}

// netOrder is the flag of the types of numbers in network byte order and of addresses.
const netOrder = unix.NLA_F_NET_BYTEORDER

func appendIP(b netlink.Buffer, kind uint16, a netip.Addr) netlink.Buffer {
	version := uint16(1)
	if a.Is6() {
		version = 2
	}
	return b.Nest(kind, func(b netlink.Buffer) netlink.Buffer { return b.Addr(version|netOrder, a) })
}

// listMessage is a request to list a set, or with an empty name all sets, as far as the flags say.
func listMessage(name string, flags uint32) netlink.Message {
	return setMessage(ipsetList, 0, name, func(b netlink.Buffer) netlink.Buffer {
		return b.BigEndian32(setAttrFlags|netOrder, flags)
	})
}

// appendCreate appends what says what a set is like.
func appendCreate(b netlink.Buffer, s Set) netlink.Buffer {
	t := setTypes[s.Type]
	family := netlink.Family(s.Family)
	if t.bitmap {
		family = unix.AF_UNSPEC
	}
	b = b.Text(setAttrType, s.Type)
	b = b.Bytes(setAttrRevision, t.revision)
	b = b.Bytes(setAttrFamily, family)
	return b.Nest(setAttrData, func(b netlink.Buffer) netlink.Buffer {
		if t.bitmap {
			b = b.BigEndian16(dataPort|netOrder, 0)
			b = b.BigEndian16(dataPortTo|netOrder, 65535)
		} else {
			b = b.BigEndian32(dataMaxElem|netOrder, s.maxElem())
		}
		if s.Marks {
			b = b.BigEndian32(dataFlags|netOrder, flagWithMarks)
		}
		return b
	})
}

// appendEntry appends an entry. The kernel names line if it does not take it.
func appendEntry(b netlink.Buffer, s Set, e Entry, line int) netlink.Buffer {
	t := setTypes[s.Type]
	return b.Nest(setAttrData, func(b netlink.Buffer) netlink.Buffer {
		b = b.Uint32(dataLine, uint32(line))
		netIP, netCIDR := uint16(dataIP), uint16(dataCIDR)
		if t.addr {
			b = appendIP(b, dataIP, e.Addr)
			netIP, netCIDR = dataIP2, dataCIDR2
		}
		if t.net {
			b = appendIP(b, netIP, e.Net.Addr())
			b = b.Bytes(netCIDR, uint8(e.Net.Bits()))
		}
		if t.second {
			b = appendIP(b, dataIP2, e.Addr2)
		}
		if t.port {
			b = b.Bytes(dataProtocol, netlink.Protocol(e.Protocol))
		}
		if t.port || t.bitmap {
			b = b.BigEndian16(dataPort|netOrder, e.Port)
		}
		if s.Marks {
			mark := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, e.Mark), e.Mask)
			b = b.Bytes(dataMark|netOrder, mark...)
		}
		return b
	})
}

// parseEntry reads an entry of a set.
func parseEntry(data []byte, s Set) (Entry, error) {
	t := setTypes[s.Type]
	var e Entry
	var err error
	var ip, ip2 netip.Addr
	var cidr, cidr2 = s.Family.Bits(), s.Family.Bits()
	for kind, value := range netlink.Attributes(data) {
		switch kind {
		case dataIP:
			ip, err = parseIP(value, err)
		case dataIP2:
			ip2, err = parseIP(value, err)
		case dataCIDR:
			cidr = int(netlink.Number(value))
		case dataCIDR2:
			cidr2 = int(netlink.Number(value))
		case dataProtocol:
			e.Protocol = netlink.ProtocolOf(uint8(netlink.Number(value)))
		case dataPort:
			e.Port = uint16(netlink.BigEndian(value))
		case dataMark:
			n := netlink.BigEndian(value)
			e.Mark, e.Mask = uint32(n>>32), uint32(n)
		}
	}
	switch {
	case t.addr && t.net:
		e.Addr, e.Net = ip, netip.PrefixFrom(ip2, cidr2)
	case t.net:
		e.Net = netip.PrefixFrom(ip, cidr)
	case t.addr:
		e.Addr, e.Addr2 = ip, ip2
	}
	if err != nil {
		return Entry{}, fmt.Errorf("an entry of ipset %s: %w", s.Name, err)
	}
	return e, nil
}

// parseIP reads an address, unless there was an error before.
func parseIP(b []byte, err error) (netip.Addr, error) {
	if err != nil {
		return netip.Addr{}, err
	}
	for _, value := range netlink.Attributes(b) {
		if a, ok := netip.AddrFromSlice(value); ok {
			return a, nil
		}
		return netip.Addr{}, fmt.Errorf("an address has %d bytes", len(value))
	}
	return netip.Addr{}, errors.New("an address is missing")
}

// actualSet is a set as the kernel has it.
type actualSet struct {
	kind                 string
	family               uint8
	flags, references    uint32
	maxElem, elements    uint32
	others               bool // it has timeouts or a netmask
	firstPort, finalPort uint16
}

// parseSet reads what a set is like.
func parseSet(body []byte) actualSet {
	var h actualSet
	for kind, value := range netlink.Attributes(behindHeader(body)) {
		switch kind {
		case setAttrType:
			h.kind = netlink.Text(value)
		case setAttrFamily:
			h.family = uint8(netlink.Number(value))
		case setAttrData:
			for kind, value := range netlink.Attributes(value) {
				n := uint32(netlink.BigEndian(value))
				switch kind {
				case dataPort:
					h.firstPort = uint16(n)
				case dataPortTo:
					h.finalPort = uint16(n)
				case dataFlags:
					h.flags = n
				case dataMaxElem:
					h.maxElem = n
				case dataElements:
					h.elements = n
				case dataReferences:
					h.references = n
				case dataTimeout, dataNetmask:
					h.others = true
				}
			}
		}
	}
	return h
}

// is reports whether a set is as it should be. How many entries it takes does not count, since it can grow, and neither does
// the revision of its type.
func (h actualSet) is(s Set) bool {
	var want actualSet
	if want.kind = s.Type; setTypes[s.Type].bitmap {
		want.finalPort = 65535
	} else {
		want.family = netlink.Family(s.Family)
	}
	if s.Marks {
		want.flags = flagWithMarks
	}
	h.references, h.maxElem, h.elements = 0, 0, 0
	return h == want
}
