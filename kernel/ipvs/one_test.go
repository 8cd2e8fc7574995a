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

// Delete removes a virtual server with its real servers, and cuts its connections.
func (s *Servers) Delete(id ServerID) error {
	return s.apply(Op{Kind: DeleteServer, Server: Server{ID: id}})
}

// AddRealServer adds a real server to a virtual server.
func (s *Servers) AddRealServer(id ServerID, d RealServer) error {
	return s.apply(Op{Kind: AddRealServer, Server: Server{ID: id}, RealServer: d})
}

// UpdateRealServer changes the weight of a real server.
func (s *Servers) UpdateRealServer(id ServerID, d RealServer) error {
	return s.apply(Op{Kind: UpdateRealServer, Server: Server{ID: id}, RealServer: d})
}

// DeleteRealServer removes a real server, and cuts its connections.
func (s *Servers) DeleteRealServer(id ServerID, addr netip.AddrPort) error {
	return s.apply(Op{Kind: DeleteRealServer, Server: Server{ID: id}, RealServer: RealServer{Addr: addr}})
}
