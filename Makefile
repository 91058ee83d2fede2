.PHONY: protos
protos:
	/tmp/w/gen/bin/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos protos/tensorferry/protos/*.proto
	/tmp/w/gen/bin/python -m grpc_tools.protoc -Iprotos --grpc_python_out=protos protos/tensorferry/protos/inference.proto
	sed -i 's/^from google.protobuf import descriptor_pool as _descriptor_pool$$/from tensorferry.protos import pool as _descriptor_pool/' protos/tensorferry/protos/*_pb2.py
