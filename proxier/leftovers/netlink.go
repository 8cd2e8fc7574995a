package leftovers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// conn is a netlink socket to netfilter.
type conn struct {
	fd  int
	seq uint32
}

// answerTimeout keeps a request from waiting for an answer that the kernel had no memory for.
const answerTimeout = 10 // seconds

func dial() (*conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket to netfilter: %w", err)
	}
	c := &conn{fd: fd}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: answerTimeout})
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("opening a netlink socket to netfilter: %w", err)
	}
	return c, nil
}

func (c *conn) close() { _ = unix.Close(c.fd) }

// Message types, and attributes, that golang.org/x/sys/unix lacks.
const (
	subsystemAccounting = 7 // NFNL_SUBSYS_ACCT
	accountingGet       = 1 // NFNL_MSG_ACCT_GET
	accountingDelete    = 3 // NFNL_MSG_ACCT_DEL
	accountingName      = 1 // NFACCT_NAME
	batchBegin          = unix.NLMSG_MIN_TYPE
	batchEnd            = unix.NLMSG_MIN_TYPE + 1
)

// nftables is the type of a message to nftables.
func nftables(message uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | message }

func accounting(message uint16) uint16 { return subsystemAccounting<<8 | message }

// nftTable is a table of nftables.
type nftTable struct {
	family uint8
	name   string
}

func (t nftTable) String() string {
	if t.family == unix.NFPROTO_IPV6 {
		return "ip6 " + t.name
	}
	return "ip " + t.name
}

// tables lists the tables of all families.
func (c *conn) tables() ([]nftTable, error) {
	var out []nftTable
	err := c.dump(nftables(unix.NFT_MSG_GETTABLE), func(body []byte) {
		if name, ok := attribute(body, unix.NFTA_TABLE_NAME); ok {
			out = append(out, nftTable{body[0], name})
		}
	})
	return out, err
}

// deleteTable deletes a table with all that is in it. nftables is changed in transactions, even if by one message.
func (c *conn) deleteTable(t nftTable) error {
	c.seq++
	var b []byte
	b = c.message(b, batchBegin, unix.NLM_F_REQUEST, 0, unix.NFNL_SUBSYS_NFTABLES, nil)
	b = c.message(b, nftables(unix.NFT_MSG_DELTABLE), unix.NLM_F_REQUEST|unix.NLM_F_ACK, t.family, 0,
		textAttribute(unix.NFTA_TABLE_NAME, t.name))
	b = c.message(b, batchEnd, unix.NLM_F_REQUEST, 0, unix.NFNL_SUBSYS_NFTABLES, nil)
	return c.exchange(b, nil)
}

// counters lists the accounting objects.
func (c *conn) counters() ([]string, error) {
	var out []string
	err := c.dump(accounting(accountingGet), func(body []byte) {
		if name, ok := attribute(body, accountingName); ok {
			out = append(out, name)
		}
	})
	return out, err
}

func (c *conn) deleteCounter(name string) error {
	c.seq++
	return c.exchange(c.message(nil, accounting(accountingDelete), unix.NLM_F_REQUEST|unix.NLM_F_ACK, 0, 0,
		textAttribute(accountingName, name)), nil)
}

// dumpTries is how often a list is asked for that changes while the kernel makes it.
const dumpTries = 5

// dump asks for a list. A subsystem that the kernel does not have has nothing to list: netfilter says EINVAL then.
func (c *conn) dump(kind uint16, each func(body []byte)) error {
	var err error
	for range dumpTries {
		c.seq++
		var bodies [][]byte
		err = c.exchange(c.message(nil, kind, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, 0, 0, nil), func(body []byte) {
			bodies = append(bodies, body)
		})
		if errors.Is(err, unix.EINTR) {
			continue
		}
		for _, body := range bodies {
			each(body)
		}
		break
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

// message appends a message with a struct nfgenmsg and an attribute.
func (c *conn) message(b []byte, kind, flags uint16, family uint8, resource uint16, attribute []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.SizeofNlMsghdr+4+len(attribute)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, c.seq)
	b = binary.NativeEndian.AppendUint32(b, 0) // from whom: the kernel knows
	b = append(b, family, unix.NFNETLINK_V0)
	b = binary.BigEndian.AppendUint16(b, resource)
	return append(b, attribute...)
}

// exchange sends messages and takes answers up to the first acknowledgement, error or end of a list. each takes what follows
// the header of every other answer.
func (c *conn) exchange(b []byte, each func(body []byte)) error {
	if err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("asking netfilter: %w", err)
	}
	interrupted := false
	for {
		buf := make([]byte, 64<<10)
		n, _, err := unix.Recvfrom(c.fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("waiting for netfilter's answer: %w", err)
		}
		messages, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return fmt.Errorf("reading netfilter's answer: %w", err)
		}
		for _, m := range messages {
			interrupted = interrupted || m.Header.Flags&unix.NLM_F_DUMP_INTR != 0
			switch {
			case m.Header.Seq != c.seq: // It belongs to a request that was given up.
			case m.Header.Type == unix.NLMSG_DONE && interrupted:
				return unix.EINTR
			case m.Header.Type == unix.NLMSG_DONE:
				return nil
			case m.Header.Type == unix.NLMSG_ERROR:
				return errorCode(m.Data)
			case len(m.Data) >= 4 && each != nil:
				each(m.Data)
			}
		}
	}
}

// errorCode reads a struct nlmsgerr; 0 is an acknowledgement.
func errorCode(body []byte) error {
	if len(body) < 4 {
		return errors.New("netfilter's answer is cut off")
	}
	if code := int32(binary.NativeEndian.Uint32(body)); code != 0 {
		return syscall.Errno(-code)
	}
	return nil
}

// textAttribute is an attribute with a text that ends with a zero byte.
func textAttribute(kind uint16, text string) []byte {
	length := unix.SizeofNlAttr + len(text) + 1
	b := binary.NativeEndian.AppendUint16(nil, uint16(length))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, text...)
	return append(b, make([]byte, (length+3)&^3-len(b))...)
}

// attribute finds a text among the attributes after a struct nfgenmsg.
func attribute(body []byte, kind uint16) (string, bool) {
	for b := body[4:]; len(b) >= unix.SizeofNlAttr; {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.SizeofNlAttr || length > len(b) {
			break
		}
		if binary.NativeEndian.Uint16(b[2:]) == kind {
			return unix.ByteSliceToString(b[unix.SizeofNlAttr:length]), true
		}
		b = b[min(len(b), (length+3)&^3):]
	}
	return "", false
}
