package ipvs

import "net/netip"

// One change at a time.

func (s *Servers) apply(o Op) error {
	if errs := s.Apply([]Op{o}); errs != nil {
		return errs[0]
	}
	return nil
}

// Add adds a virtual server.
func (s *Servers) Add(v Server) error { return s.apply(Op{Kind: AddServer, Server: v}) }

// Update changes a virtual server. Connections go on.
func (s *Servers) Update(v Server) error { return s.apply(Op{Kind: UpdateServer, Server: v}) }

// Delete removes a virtual server with its destinations, and cuts its connections.
func (s *Servers) Delete(id ServerID) error {
	return s.apply(Op{Kind: DeleteServer, Server: Server{ID: id}})
}

// AddDestination adds a destination to a virtual server.
func (s *Servers) AddDestination(id ServerID, d Destination) error {
	return s.apply(Op{Kind: AddDestination, Server: Server{ID: id}, Destination: d})
}

// UpdateDestination changes the weight of a destination.
func (s *Servers) UpdateDestination(id ServerID, d Destination) error {
	return s.apply(Op{Kind: UpdateDestination, Server: Server{ID: id}, Destination: d})
}

// DeleteDestination removes a destination, and cuts its connections.
func (s *Servers) DeleteDestination(id ServerID, addr netip.AddrPort) error {
	return s.apply(Op{Kind: DeleteDestination, Server: Server{ID: id}, Destination: Destination{Addr: addr}})
}
