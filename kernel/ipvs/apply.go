package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
)

// OpKind says what an Op does.
type OpKind uint8

// The kinds of Op. Adding what exists updates it, updating a real server that is gone adds it, and deleting what is gone is no error. Any other
// change of a virtual server that is gone, or of its real servers, fails with ESRCH, since all of its real servers are gone, too; but for the
// deletion of a real server where a later Op deletes the virtual server.
const (
	AddServer OpKind = iota
	UpdateServer
	DeleteServer // with its real servers and persistence templates; open connections are cut
	AddRealServer
	UpdateRealServer
	DeleteRealServer
)

// Op is one change: of the virtual server Server, or of a real server of the one that Server.ID names; then no other field of
// Server matters. To delete a real server, its address is enough.
type Op struct {
	Kind       OpKind
	Server     Server
	RealServer RealServer
}

func (o Op) String() string {
	doing := opCommands[o.Kind].doing
	switch o.Kind {
	case AddServer, UpdateServer:
		return fmt.Sprintf("%s virtual server %s, scheduler %s", doing, o.Server.ID, o.Server.Scheduler)
	case DeleteServer:
		return fmt.Sprintf("%s virtual server %s", doing, o.Server.ID)
	}
	return fmt.Sprintf("%s real server %s of virtual server %s", doing, o.RealServer.Addr, o.Server.ID)
}

// opCommands are the kernel's commands for each kind of Op: the expected one, and the one to use if the object did not exist, or
// existed already; 0 for none.
var opCommands = [...]struct {
	doing              string
	command, otherwise uint8
}{
	AddServer:        {"adding", commandNewService, commandSetService},
	UpdateServer:     {"changing", commandSetService, 0},
	DeleteServer:     {"deleting", commandDelService, 0},
	AddRealServer:    {"adding", commandNewDest, commandSetDest},
	UpdateRealServer: {"changing", commandSetDest, commandNewDest},
	DeleteRealServer: {"deleting", commandDelDest, 0},
}

// typicalBody is the length of the body of a message that adds a virtual server.
const typicalBody = 140

// Apply carries out ops in order, some two hundred per round trip. It returns nil, or an error (or nil) for each op. A failed op
// does not keep those after it from being carried out.
func (s *Servers) Apply(ops []Op) []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	messages := make([]netlink.Message, len(ops))
	bodies := make(netlink.Buffer, 0, typicalBody*len(ops))
	for i, o := range ops {
		begin := len(bodies)
		bodies = appendCommand(bodies, opCommands[o.Kind].command, o)
		messages[i] = netlink.Message{Type: s.family, Body: bodies[begin:]}
	}
	errs := s.conn.Do(messages...)
	if errs == nil {
		return nil
	}

	// Try again where the caller's knowledge of the kernel's state was wrong.
	var again []netlink.Message
	var indexes []int
	late := superseded(ops)
	for i, o := range ops {
		command, ok := o.otherwise(errs[i], late[i])
		if !ok {
			continue
		}
		errs[i] = nil
		if command != 0 && !late[i] {
			again, indexes = append(again, s.command(command, o)), append(indexes, i)
		}
	}
	for j, err := range s.conn.Do(again...) {
		errs[indexes[j]] = err
	}
	if !slices.ContainsFunc(errs, func(err error) bool { return err != nil }) {
		return nil
	}
	for i, o := range ops {
		if errs[i] != nil {
			errs[i] = o.failed(errs[i])
		}
	}
	return errs
}

// superseded says for each op whether a later one changes the same object, so that it must not be retried.
func superseded(ops []Op) []bool {
	type object struct {
		server     ServerID
		realServer netip.AddrPort // or zero, for the server
	}
	seen, deleted := map[object]bool{}, map[ServerID]bool{}
	late := make([]bool, len(ops))
	for i, o := range slices.Backward(ops) {
		this := object{server: o.Server.ID}
		if o.Kind > DeleteServer {
			this.realServer = o.RealServer.Addr
		}
		late[i] = seen[this] || deleted[o.Server.ID]
		seen[this] = true
		if o.Kind == DeleteServer {
			deleted[o.Server.ID] = true
		}
	}
	return late
}

// otherwise returns the command to try after another one failed, or 0 if the failure does not matter. It returns false if no
// command will help. A later op about the same object, or one that deletes it with its virtual server, makes it late.
func (o Op) otherwise(err error, late bool) (command uint8, ok bool) {
	switch otherwise := opCommands[o.Kind].otherwise; {
	case err == nil, o.Kind == UpdateServer:
		return 0, false
	case o.Kind == DeleteRealServer && !late:
		return 0, errors.Is(err, unix.ENOENT)
	case otherwise == 0:
		return 0, missing(err)
	case errors.Is(err, unix.EEXIST), o.Kind == UpdateRealServer && errors.Is(err, unix.ENOENT):
		return otherwise, true
	}
	return 0, false
}

// missing reports whether an error says that a virtual server or a real server is not there.
func missing(err error) bool { return errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) }

// failed returns the error of an op.
func (o Op) failed(err error) error {
	switch server := o.Kind == AddServer || o.Kind == UpdateServer; {
	case server && errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%s: the kernel lacks this scheduler, and could not load the module ip_vs_%s: %w", o, o.Server.Scheduler, err)
	case server && errors.Is(err, unix.EAFNOSUPPORT):
		return fmt.Errorf("%s: the kernel has IPVS without %s: %w", o, o.Server.ID.Family, err)
	case errors.Is(err, unix.ESRCH):
		return fmt.Errorf("%s: there is no such virtual server: %w", o, err)
	default:
		return fmt.Errorf("%s: %w", o, err)
	}
}

// command returns the message that carries out an op by a certain command.
func (s *Servers) command(command uint8, o Op) netlink.Message {
	return netlink.Message{Type: s.family, Body: appendCommand(nil, command, o)}
}

// appendCommand appends the body of that message.
func appendCommand(body netlink.Buffer, command uint8, o Op) netlink.Buffer {
	body = append(body, genl(command)...).Nest(attrService, func(b netlink.Buffer) netlink.Buffer {
		if command == commandNewService || command == commandSetService {
			return appendService(b, o.Server)
		}
		return appendServiceID(b, o.Server.ID)
	})
	switch command {
	case commandNewDest, commandSetDest:
		body = body.Nest(attrDest, func(b netlink.Buffer) netlink.Buffer { return appendRealServer(b, o.RealServer) })
	case commandDelDest:
		body = body.Nest(attrDest, func(b netlink.Buffer) netlink.Buffer { return appendRealServerID(b, o.RealServer.Addr) })
	}
	return body
}
