package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/probe"
)

// The parts of an ARP packet for IPv4 on Ethernet (RFC 826).
const (
	arpSize       = 28
	arpRequest    = 1
	arpSenderAddr = 14
)

// arpPatience is how long an answer may take.
const arpPatience = 500 * time.Millisecond

// arping asks all on the network of a node's eth0 who has an address, and reports whether somebody answers.
func arping(from *harness.Node, target netip.Addr) (answered bool, err error) {
	link, err := from.Netlink().LinkByName("eth0")
	if err != nil {
		return false, fmt.Errorf("eth0 of %s: %w", from.Name, err)
	}
	protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, syscall.ETH_P_ARP))
	err = from.Do(func() error {
		fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, int(protocol))
		if err != nil {
			return err
		}
		defer syscall.Close(fd)
		everybody := &syscall.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Attrs().Index, Halen: 6,
			Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}}
		p := []byte{0, 1, 8, 0, 6, 4, 0, arpRequest} // Ethernet, IPv4, the lengths of their addresses
		p = append(p, link.Attrs().HardwareAddr...)
		p = append(p, from.IP4.AsSlice()...)
		p = append(append(p, make([]byte, 6)...), target.AsSlice()...)
		if err := syscall.Sendto(fd, p, 0, everybody); err != nil {
			return err
		}
		answered, err = awaitARP(fd, target)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("ARP from %s: %w", from.Name, err)
	}
	return answered, nil
}

// awaitARP reads packets until one says who has the address.
func awaitARP(fd int, target netip.Addr) (bool, error) {
	deadline := time.Now().Add(arpPatience)
	for {
		left := syscall.NsecToTimeval(max(time.Until(deadline), time.Millisecond).Nanoseconds())
		if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &left); err != nil {
			return false, err
		}
		var p [64]byte
		n, err := probe.Read(fd, p[:])
		switch {
		case errors.Is(err, syscall.EAGAIN):
			return false, nil
		case err != nil:
			return false, err
		case n >= arpSize && netip.AddrFrom4([4]byte(p[arpSenderAddr:arpSenderAddr+4])) == target:
			return true, nil
		case time.Now().After(deadline):
			return false, nil
		}
	}
}
